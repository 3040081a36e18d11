"""A pack as one web page: what was measured, what was decided, and why."""
