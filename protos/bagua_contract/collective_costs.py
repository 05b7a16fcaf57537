"""Says what a collective sends over one member's interface, how many messages wait for one another, and what QAdam does
to memory beside it. Pure.

Used by predictions of the agent and by the simulator of benchmarks/scaling, which adds bandwidth, latency and
processors.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a collective.

    sent_bytes: by each member. rounds: messages that wait for one another. messages: to peers at the same time, each
    of which has a cost of its own.
    """

    sent_bytes: float
    rounds: int
    messages: int = 0


def ring_allreduce(members: int, size_bytes: float) -> Cost:
    """Returns the cost of a ring: each member sends every part but one twice, to sum it and to spread the sum."""
    if members < 2:
        return Cost(0.0, 0)
    return Cost(2 * (members - 1) / members * size_bytes, 2 * (members - 1))


def alltoall(members: int, size_bytes: float) -> Cost:
    """Returns the cost of messages between all pairs of members. size_bytes: for each peer."""
    others = members - 1
    return Cost(others * size_bytes, 1, messages=others) if others else Cost(0.0, 0)


def allgather(members: int, size_bytes: float) -> Cost:
    """Returns the cost of a ring. size_bytes: of each member's part."""
    others = members - 1
    return Cost(others * size_bytes, others)


def compressed_bytes(values: int) -> float:
    """Returns the bytes of values as min-max uint8, without padding: 1 each, and 8 for each block of 2,048."""
    return values + 8 * -(-values // 2048)


class Passes(NamedTuple):
    """Counts passes over the values of a bucket in fp32, beside the compression; one reads an array and writes one.

    before, behind: the exchange. optimizer: more than SGD's.
    """

    before: float = 0.0
    behind: float = 0.0
    optimizer: float = 0.0


NO_PASSES = Passes()
# Counted in bagua_core, arrays read or written: kernels.adam_steps 5 and the errors 2; then the copy of the sums 2,
# their difference 3 and kernels.adam_gradients 3 (bucket_moments.py). kernels.adam_update has 6, and SGD has 3.
OF_QADAM = Passes(before=3.5, behind=4.0, optimizer=1.5)
