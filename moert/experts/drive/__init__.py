"""Reads experts from the drive, as it is best read."""
