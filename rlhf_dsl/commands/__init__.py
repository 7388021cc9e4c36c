"""The subcommands that need the language alone. Each takes the parsed arguments and returns the exit code."""
