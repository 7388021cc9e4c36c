"""Writes programs that are right, over the whole language: whatever `check` takes must compile, be proved, and run."""
