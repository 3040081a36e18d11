"""Experts on a device beside those in memory: who lies there, and who computes."""
