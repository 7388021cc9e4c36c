"""Random numbers with names: each draw is a pure function of what it is for, and of nothing else.

All arithmetic is on unsigned 64-bit integers, modulo 2**64. Signed inputs enter as their two's complement.

    mix(z):     z = z + 0x9E3779B97F4A7C15
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                return z ^ (z >> 31)
    fnv1a64(s): h = 0xCBF29CE484222325; for each byte of s in UTF-8: h = (h ^ byte) * 0x100000001B3; return h
    key(seed, name, v1, .., vk):
                h = mix(seed); for v in fnv1a64(name), v1, .., vk: h = mix(h ^ v); return h

    uniform(seed, response name, iteration, row, sample, position)
                = (key(seed, name, iteration, row, sample, position) >> 11) * 2**-53, in [0, 1)
    permutation(n, seed, name, v1, .., vk)
                = the indices i of 0 .. n-1 in ascending order of key(seed, name, v1, .., vk, i)

`row` is the position of the root row in its data stream, `sample` counts the samples of a row from 0, `position`
counts the tokens of the response from 0. The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014); the hash of names is FNV-1a.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S27, _S30, _S31, _S11 = (np.uint64(s) for s in (27, 30, 31, 11))


def fnv1a64(name: str) -> int:
    """The 64-bit FNV-1a hash of a name in UTF-8."""
    h = 0xCBF29CE484222325
    for byte in name.encode("utf-8"):
        h = ((h ^ byte) * 0x100000001B3) & _MASK
    return h


def key(seed: int, name: str, *values) -> np.ndarray:
    """`key` above; the values are integers or integer arrays that broadcast. uint64, at least one-dimensional."""
    h = _mix(_words(seed))
    for value in (fnv1a64(name), *values):
        h = _mix(h ^ _words(value))
    return h


def uniform(seed: int, name: str, iteration: int, rows, samples, positions) -> np.ndarray:
    """float64 in [0, 1), one for each of the broadcast rows, samples and positions."""
    return _unit(key(seed, name, iteration, rows, samples, positions))


def permutation(n: int, seed: int, name: str, *values: int) -> np.ndarray:
    """int64 [n], an order of 0 .. n-1 that is a function of the seed, the name and the values alone."""
    return np.argsort(key(seed, name, *values, np.arange(n)), kind="stable")


class Draws:
    """The draws of many samples of one response: `at(which, positions)` costs one mixing a token.

    rows, samples: int64 [n], of each sample the position of its root row in the stream and its place in the group
    """

    def __init__(self, seed: int, name: str, iteration: int, rows, samples) -> None:
        self._prefix = key(seed, name, iteration, rows, samples)

    def at(self, which: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float64 [m]: the draws of the samples `which` (int64 [m]) at their token positions (int64 [m])."""
        return _unit(_mix(self._prefix[which] ^ _words(positions)))


def _words(value) -> np.ndarray:
    if isinstance(value, int):
        return np.array([value & _MASK], dtype=np.uint64)
    return np.atleast_1d(np.asarray(value)).astype(np.int64).view(np.uint64)


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


def _unit(h: np.ndarray) -> np.ndarray:
    return (h >> _S11) * 2.0 ** -53
