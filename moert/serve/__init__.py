"""Serving models to clients of other programs' interfaces: calls of tools, and conversations as those clients have
them."""
