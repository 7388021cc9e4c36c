"""Measures this machine's constants for the cost model."""
