"""Packs of a conversion: writing them, checking and running them, and following text through their routers."""
