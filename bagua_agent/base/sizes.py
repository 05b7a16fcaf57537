"""Decides which numbers of nodes a job may have: allowed sizes, start size, cooldown between voluntary changes. Pure.

Shared by the job's configuration, its leader and `scale`, so that all of them agree on what an allowed size is. Does
not know why a size is asked for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bagua_agent.base.plain_text import counted

if TYPE_CHECKING:  # the command line, which is to start fast, reads no records
    from bagua_contract import membership_pb2 as pb


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
class Room:
    """The sizes that the next generation may have. most: nodes; sizes: ascending, none of them if all are allowed."""

    most: int
    sizes: tuple[int, ...] = ()

    def fit(self, nodes: int) -> int:
        """Returns the largest allowed size that so many nodes permit. Below the smallest size: what there is, so that
        the minimum decides."""
        most = min(nodes, self.most)
        return max((s for s in self.sizes if s <= most), default=most)

    def next_above(self, nodes: int) -> int | None:
        """Returns the smallest allowed size above `nodes`; None: there is none."""
        if nodes >= self.most:
            return None
        return min(
            (s for s in self.sizes if nodes < s <= self.most), default=None if self.sizes else nodes + 1
        )

    def awaits(self, nodes: int, spares: int) -> str:
        """Returns why ready nodes are spare below the maximum: too few for the next size. Empty: another reason, or
        none."""
        size = self.next_above(nodes) if self.sizes and spares else None
        if size is None or nodes + spares >= size:
            return ""
        missing, sizes = counted(size - nodes - spares, "more node"), ", ".join(map(str, self.sizes))
        return f"waiting for {missing} to train on {size} (allowed sizes: {sizes}); "


@dataclass(frozen=True, slots=True)
class SizePolicy:
    """The sizes that a job may have. sizes: allowed numbers of nodes, ascending; empty: each. start_size: nodes for
    which the first generation waits; 0: the minimum. cooldown_s: between two changes of the number of nodes, if the
    later one is voluntary."""

    sizes: tuple[int, ...] = ()
    start_size: int = 0
    cooldown_s: float = 0.0

    def __post_init__(self) -> None:
        if any(s < 1 for s in self.sizes) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must be ascending numbers from 1 on, not {self.text}")
        if self.sizes and self.start_size and self.start_size not in self.sizes:
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

        return None if self == ANY_SIZE else membership_pb2.SizePolicy(**asdict(self))

    @property
    def text(self) -> str:
        return ", ".join(map(str, self.sizes))

    def forbidden(self, *nodes: int) -> int | None:
        """Returns the first of these numbers that is not an allowed size; None if all are allowed."""
        return next((n for n in nodes if self.sizes and n not in self.sizes), None)

    def bounds(self, least: int, most: int) -> tuple[int, int]:
        """Returns the range, its ends moved inwards to allowed sizes. A range that holds none was written by a client
        that checks no sizes: it counts as it is."""
        inside = [s for s in self.sizes if least <= s <= most]
        return (inside[0], inside[-1]) if inside else (least, most)

    def room(self, least: int, most: int) -> Room:
        """Returns the sizes that the next generation may have. least, most: nodes that are wanted. Sizes below the
        least belong to it: a minimum that was raised stops no worker, so a smaller generation goes on."""
        holds_one = any(least <= s <= most for s in self.sizes)
        return Room(self.bounds(least, most)[1], self.sizes if holds_one else ())

    def waits(self, change: str) -> str:
        """Returns the text about a voluntary change that the cooldown delays. It is the same for as long as it does,
        since a new text is a new line on the terminal."""
        return f"waiting for the cooldown of {self.cooldown_s:g} s since the last change ({change}); "

    def least_to_start(self, least: int, most: int) -> int:
        """Returns the number of nodes that the first generation needs."""
        return max(least, min(self.start_size, most))


ANY_SIZE = SizePolicy()
"""What a job has that asks for nothing else."""
