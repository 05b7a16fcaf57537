"""Decides which numbers of nodes a job may have: allowed sizes, start size, cooldown between voluntary changes. Pure.

Shared by the job's configuration, its leader and `scale`, so that all of them agree on what an allowed size is. Does
not know why a size is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua_agent.base.plain_text import counted

if TYPE_CHECKING:  # the command line, which is to start fast, reads no records
    from bagua_contract import membership_pb2 as pb


_SIZES_IN_TEXT = 4


def nodes_with_a_part(nodes: int, slots: int, replica_size: int) -> int:
    """Returns how many of `nodes` nodes with `slots` workers each have workers of a replica, once as many replicas of
    `replica_size` workers as possible are formed on the fewest nodes; the rest has only spares."""
    if replica_size <= slots:
        return nodes
    used = nodes * slots // replica_size * replica_size
    return -(-used // slots)


def whole_replicas(nodes: int, slots: int, replica_size: int) -> tuple[int, int]:
    """Returns the numbers of nodes next to `nodes`, below (0: none) and above, that all have a part of a replica;
    `nodes` twice if it is one."""
    used = nodes_with_a_part(nodes, slots, replica_size)
    if used == nodes:
        return nodes, nodes
    return used, -(-(nodes * slots // replica_size + 1) * replica_size // slots)


@dataclass(frozen=True, slots=True)
class Groups:
    """Allows the numbers of nodes that hold whole replicas of several nodes. replica_size: workers of a replica. slots:
    workers of each node."""

    replica_size: int
    slots: int

    def __post_init__(self) -> None:
        if not 1 <= self.slots < self.replica_size:
            raise ValueError(
                f"a replica of {self.replica_size} workers is on no several nodes of {self.slots} slots"
            )

    def largest(self, most: int) -> int | None:
        return whole_replicas(most, self.slots, self.replica_size)[0] or None

    def smallest(self, least: int) -> int:
        return whole_replicas(least, self.slots, self.replica_size)[1]


@dataclass(frozen=True, slots=True)
class AllowedSizes:
    """The sizes that the next generation may have. most: nodes; policy: says which numbers up to it are allowed."""

    most: int
    policy: SizePolicy

    @property
    def limited(self) -> bool:
        """Whether some numbers of nodes up to the most may be forbidden."""
        return self.policy.limited

    def fit(self, nodes: int) -> int:
        """Returns the largest allowed size that so many nodes permit. Below the smallest size: what there is, so that
        the minimum decides."""
        most = min(nodes, self.most)
        return self.policy.largest(most) or most

    def next_above(self, nodes: int) -> int | None:
        """Returns the smallest allowed size above `nodes`; None: there is none."""
        size = self.policy.smallest(nodes + 1)
        return None if size is None or size > self.most else size

    def awaits(self, nodes: int, spares: int) -> str:
        """Returns why ready nodes are spare below the maximum: too few for the next size. Empty: another reason, or
        none."""
        size = self.next_above(nodes) if self.limited and spares else None
        if size is None or nodes + spares >= size:
            return ""
        missing = counted(size - nodes - spares, "more node")
        return f"waiting for {missing} to train on {size} (allowed sizes: {self.policy.text}); "


@dataclass(frozen=True, slots=True)
class SizePolicy:
    """The sizes that a job may have. sizes: allowed numbers of nodes, ascending; empty: each. start_size: nodes for
    which the first generation waits; 0: the minimum. cooldown_s: between two changes of the number of nodes, if the
    later one is voluntary. groups: allowed where no sizes are listed; None: each number is. A scheduler has them
    alone: a job's leader knows the replicas themselves."""

    sizes: tuple[int, ...] = ()
    start_size: int = 0
    cooldown_s: float = 0.0
    groups: Groups | None = None

    def __post_init__(self) -> None:
        if any(s < 1 for s in self.sizes) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must be ascending numbers from 1 on, not {self.text}")
        if self.start_size and self.forbidden(self.start_size) is not None:
            raise ValueError(f"start size {self.start_size} is not an allowed size ({self.text})")
        if not 0 <= self.cooldown_s < float("inf"):  # not a number fails too
            raise ValueError(f"the cooldown must be a time of 0 s or more, not {self.cooldown_s}")

    @staticmethod
    def of(record: pb.SizePolicy) -> SizePolicy:
        """Reads the policy of a record. Raises ValueError for one that no launcher writes."""
        return SizePolicy(tuple(record.sizes), record.start_size, record.cooldown_s)

    @property
    def record(self) -> pb.SizePolicy | None:
        """Returns the policy as a record; None where it says nothing, so that the record that holds it is as before
        there were sizes."""
        from bagua_contract import membership_pb2

        return (
            None
            if self == ANY_SIZE
            else membership_pb2.SizePolicy(
                sizes=self.sizes, start_size=self.start_size, cooldown_s=self.cooldown_s
            )
        )

    @property
    def limited(self) -> bool:
        return bool(self.sizes) or self.groups is not None

    @property
    def text(self) -> str:
        if self.sizes or self.groups is None:
            return ", ".join(map(str, self.sizes))
        sizes = [self.groups.smallest(1)]
        while len(sizes) < _SIZES_IN_TEXT:
            sizes.append(self.groups.smallest(sizes[-1] + 1))
        return ", ".join(map(str, sizes)) + ", ..."

    def largest(self, most: int) -> int | None:
        """Returns the largest allowed size up to `most`; None: there is none."""
        if self.sizes:
            return max((s for s in self.sizes if s <= most), default=None)
        return most if self.groups is None else self.groups.largest(most)

    def smallest(self, least: int) -> int | None:
        """Returns the smallest allowed size from `least` on; None: there is none."""
        if self.sizes:
            return min((s for s in self.sizes if s >= least), default=None)
        return least if self.groups is None else self.groups.smallest(least)

    def forbidden(self, *nodes: int) -> int | None:
        """Returns the first of these numbers that is not an allowed size; None if all are allowed."""
        return next((n for n in nodes if self.smallest(n) != n), None)

    def bounds(self, least: int, most: int) -> tuple[int, int]:
        """Returns the range, its ends moved inwards to allowed sizes. A range that holds none was written by a client
        that checks no sizes: it counts as it is."""
        first, last = self.smallest(least), self.largest(most)
        return (least, most) if first is None or last is None or first > last else (first, last)

    def room(self, least: int, most: int) -> AllowedSizes:
        """Returns the sizes that the next generation may have. least, most: nodes that are wanted. Sizes below the
        least belong to it: a minimum that was raised stops no worker, so a smaller generation goes on."""
        first, last = self.bounds(least, most)
        return AllowedSizes(last, self if self.forbidden(first, last) is None else ANY_SIZE)

    def waits(self, change: str) -> str:
        """Returns the text about a voluntary change that the cooldown delays. It is the same for as long as it does,
        since a new text is a new line on the terminal."""
        return f"waiting for the cooldown of {self.cooldown_s:g} s since the last change ({change}); "

    def least_to_start(self, least: int, most: int) -> int:
        """Returns the number of nodes that the first generation needs."""
        return max(least, min(self.start_size, most))


ANY_SIZE = SizePolicy()
"""What a job has that asks for nothing else."""
