"""The sensitivity of each expert, alone at another width: probes, the workers that measure them, and when to stop."""
