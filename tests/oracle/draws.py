"""Named random numbers on Python integers, written from the definition at the head of `runtime/draws.py`."""

from __future__ import annotations

M64 = 2 ** 64


def splitmix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) % M64
    z = (z ^ (z // 2 ** 30)) * 0xBF58476D1CE4E5B9 % M64
    z = (z ^ (z // 2 ** 27)) * 0x94D049BB133111EB % M64
    return z ^ (z // 2 ** 31)


def hashed(name: str) -> int:
    h = 0xCBF29CE484222325
    for byte in name.encode("utf-8"):
        h = (h ^ byte) * 0x100000001B3 % M64
    return h


def key(seed: int, name: str, *values: int) -> int:
    h = splitmix(seed % M64)
    for v in (hashed(name), *values):
        h = splitmix(h ^ (v % M64))
    return h


def uniform(seed: int, name: str, iteration: int, row: int, sample: int, position: int) -> float:
    """In [0, 1)."""
    return key(seed, name, iteration, row, sample, position) // 2 ** 11 / 2 ** 53


def permuted(n: int, seed: int, name: str, *values: int) -> list[int]:
    """0 .. n-1 in ascending order of their keys."""
    keys = [key(seed, name, *values, i) for i in range(n)]
    return sorted(range(n), key=keys.__getitem__)
