"""Defines values for what a worker waits in, and for its earlier operations with all members of its generation.

Checked at birth: a report of another version or of unknown origin raises ValueError where it enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a command line is read without protobuf
    from bagua_contract import membership_pb2 as pb

MOST_OPERATIONS = 8  # that a report carries
LONGEST_NAME = 120  # of an operation or a call site, in characters


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that all members of a generation do, in the same order.

    step: steps committed before it. place: among the operations since that commit, from 0. name: reads on from "rank 0
    waits".
    """

    step: int
    place: int
    name: str

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.place


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """A worker's wait in a collective, as it reports it.

    call_site: file:line of the script, or that it has ended. operations: the newest, oldest first; the worker waits
    in the last one.
    """

    call_site: str
    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.operations) <= MOST_OPERATIONS:
            raise ValueError(f"a wait lists {len(self.operations)} operations, not 1 to {MOST_OPERATIONS}")
        if any(a.position >= b.position for a, b in zip(self.operations, self.operations[1:], strict=False)):
            raise ValueError("a wait's operations are not in order")

    @property
    def newest(self) -> Operation:
        return self.operations[-1]

    def to_proto(self) -> pb.CollectiveWait:
        from bagua_contract import membership_pb2 as pb

        return pb.CollectiveWait(
            call_site=self.call_site,
            operations=[pb.Operation(step=o.step, place=o.place, name=o.name) for o in self.operations],
        )

    @classmethod
    def from_proto(cls, message: pb.CollectiveWait) -> CollectiveWait:
        """Returns the wait of a message. Raises ValueError for one that is not valid."""
        operations = tuple(Operation(o.step, o.place, _line(o.name)) for o in message.operations)
        return cls(_line(message.call_site), operations)


def _line(text: str) -> str:
    """Returns the text as one line of bounded length: it is shown to people."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_NAME])
