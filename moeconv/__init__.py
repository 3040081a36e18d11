"""moeconv: turns a Mixture-of-Experts checkpoint into a model.pack."""

__version__ = "0.1.0"
