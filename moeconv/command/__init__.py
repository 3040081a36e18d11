"""What is typed, and what a person reads: commands, recipes, tables, the bar."""
