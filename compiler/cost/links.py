"""Collectives by the alpha-beta model over the links that a group really crosses.

A ring of n devices passes n - 1 messages for an all-gather or a reduce-scatter, twice that for an all-reduce, each of
1/n of the bytes (Thakur, Rabenseifner and Gropp 2005). A ring that leaves a node uses its share of the node's cards.
"""

from __future__ import annotations

from typing import NamedTuple

from compiler.machine import Machine


class Link(NamedTuple):
    """bytes/s of each ring of a group, seconds of a message."""

    bandwidth: float
    latency: float


def group_link(machine: Machine, size: int, stride: int) -> Link:
    """The slowest link of groups of `size` devices at distances of `stride`, all groups of a node at work at once.

    With order tp-dp-pp, tensor groups have stride 1, data groups stride tp, pipelines stride tp * dp.
    """
    reached, each = machine.reached.links, machine.devices_per_node
    if (size - 1) * stride < each:
        return Link(machine.intra * reached, machine.intra_latency)
    inside = max(1, each // stride)  # members of a group in a node
    rings = each / inside
    return Link(min(machine.intra, machine.node / rings) * reached, machine.inter_latency)


def gather(link: Link, size: int, total: float) -> float:
    """Seconds of an all-gather, or of a reduce-scatter, of `total` bytes over `size` devices."""
    return (size - 1) * (link.latency + total / size / link.bandwidth) if size > 1 else 0.0


def all_reduce(link: Link, size: int, total: float) -> float:
    return 2 * gather(link, size, total)


def send(link: Link, size: float) -> float:
    return link.latency + size / link.bandwidth
