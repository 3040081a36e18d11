"""Readers of the model to convert: its files, its architecture, and its experts and routers once it is in memory."""
