"""What is typed and printed: commands, options, prompts, exit codes."""
