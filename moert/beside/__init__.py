"""Beside the core: packages that are loaded when a setting or a pack names them."""
