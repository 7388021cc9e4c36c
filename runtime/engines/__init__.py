"""Engines: what holds a model on a rank."""
