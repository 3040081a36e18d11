"""The command line: commands, options, prompts, exit codes."""
