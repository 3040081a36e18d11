"""Experts in memory: from the disk (store), kept within a budget (cache), and run (streaming)."""
