"""Search for a placement: which models share devices, how many they get, and each model's layout in every stage."""

from compiler.search.placement import Found, Group, ModelPlacement, search

__all__ = ["Found", "Group", "ModelPlacement", "search"]
