"""What this machine has: memory, control groups, cores."""
