"""Defines the interface of a store: it reads frames, writes frames, and reports how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bagua_core.cache.frames import Buffer


@dataclass(frozen=True, slots=True)
class Item:
    """A frame to be written; an empty one removes what is under the key. replaces: overwrite the frame under this key,
    which is unreadable or is put anew. If the new frame is refused, the old one is removed."""

    key: bytes
    frame: bytearray
    replaces: bool = False


def removal(key: bytes) -> Item:
    return Item(key, bytearray(), replaces=True)


@dataclass(slots=True)
class Written:
    """The numbers of items kept, refused for lack of space, and lost to a fault. Items already there don't count,
    and neither do removals that succeed."""

    stored: int = 0
    refused: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tells how full a store is. entries and used_bytes: -1 where it is not known (or costs too much to ask)."""

    entries: int
    used_bytes: int
    capacity_bytes: int
    where: str


class Store(Protocol):
    """A store as one process uses it. Reads come from the thread that loads samples, writes from one other thread.

    Neither call raises for a store that does not work: what is read is missing, what is written is lost, and the
    store itself says so once.
    """

    def read(self, keys: Sequence[bytes]) -> Sequence[Buffer | None]:
        """Returns a frame for each key, None where there is none. To be read at once, not kept; `end_read` follows."""

    def end_read(self) -> None:
        """Ends the use of the frames of the newest `read`: what is removed from the store need not be kept for
        them."""

    def write(self, items: Sequence[Item]) -> Written: ...

    def usage(self) -> Usage: ...

    def count(self) -> int:
        """Returns the number of entries, which may take long. Raises StoreFault."""

    def clear(self) -> None:
        """Forgets all entries. Raises StoreFault."""

    def is_whole(self) -> bool:
        """Tells whether all of the store answers now."""

    def close(self) -> None: ...


class NoStore:
    """Takes the place of a store that could not be opened: the data set is read as if there were no cache."""

    def read(self, keys: Sequence[bytes]) -> Sequence[Buffer | None]:
        return [None] * len(keys)

    def end_read(self) -> None:
        return None

    def write(self, items: Sequence[Item]) -> Written:
        return Written(lost=len(items))

    def usage(self) -> Usage:
        return Usage(0, 0, 0, "nowhere")

    def count(self) -> int:
        return 0

    def clear(self) -> None:
        return None

    def is_whole(self) -> bool:
        return False

    def close(self) -> None:
        return None
