"""Experts in memory: their places, and who may use them."""
