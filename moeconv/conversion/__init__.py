"""Whole runs, from the user's settings to the pack on disk. Only this package and `command` know settings."""
