"""Says what a collective sends over one member's interface, and how many messages wait for one another. Pure.

Used by predictions of the agent and by the simulator of benchmarks/scaling, which adds bandwidth, latency and
processors.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """sent_bytes: by each member. rounds: messages that wait for one another. messages: to peers at the same time, each
    of which has a cost of its own."""

    sent_bytes: float
    rounds: int
    messages: int = 0


def ring_allreduce(members: int, size_bytes: float) -> Cost:
    """Each member sends every part but one twice: to sum it, and to spread the sum."""
    if members < 2:
        return Cost(0.0, 0)
    return Cost(2 * (members - 1) / members * size_bytes, 2 * (members - 1))


def alltoall(members: int, size_bytes: float) -> Cost:
    """size_bytes: for each peer."""
    others = members - 1
    return Cost(others * size_bytes, 1, messages=others) if others else Cost(0.0, 0)


def allgather(members: int, size_bytes: float) -> Cost:
    """size_bytes: of each member's part. A ring."""
    others = members - 1
    return Cost(others * size_bytes, others)


def compressed_bytes(values: int) -> float:
    """Of values as min-max uint8, without padding: one byte each, and 8 for each block of 2,048."""
    return values + 8 * -(-values // 2048)
