"""The command line: commands, recipes, and tables for a person."""
