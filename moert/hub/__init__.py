"""Packs of a hub: fetched, checked, listed and removed."""
