"""Executes a plan on one rank: `executor.Executor` walks the steps, the other modules know one kind of step each."""
