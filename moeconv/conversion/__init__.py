"""Whole runs, from what was asked for to what is written. Only here and in `command` are settings known."""
