"""A pack as one web page: the measurements, the decisions, and their reasons."""
