"""moert: runs a model.pack inside a memory budget."""

__version__ = "0.1.0"
