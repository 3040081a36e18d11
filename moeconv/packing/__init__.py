"""Writes packs and reads them back: what a conversion emits, checked, run and followed through its routers."""
