"""What each expert costs when it alone has another width: probes, who does them, and when to stop."""
