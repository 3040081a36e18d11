"""Knowing the experts beforehand: the hash function of a pack (moert.pack.hash), trained on what routers choose."""
