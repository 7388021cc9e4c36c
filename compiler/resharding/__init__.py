"""Moves of a model's weights between two layouts: which boxes of which tensors, by which collectives, in which rounds."""
