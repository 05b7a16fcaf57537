"""Decides where a node's cache is placed and how large it may be. Pure.

Shared memory also carries what DataLoader's processes hand over, and counts as memory; so the cache never plans with
all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LEAST_BYTES = 1 << 20
KEPT_FREE_BYTES = 64 << 20  # of a file system, for others: DataLoader dies of a full /dev/shm
DEFAULT_SHARE = 0.5  # of what is free


UNKNOWN_MEMORY_BYTES = 4 << 30  # taken to be there where nothing says how much there is


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """A directory that could hold the cache, and what is free there (None: it cannot be used)."""

    path: Path
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    path: Path | None
    capacity_bytes: int
    reason: str


def place(rooms: list[CacheDirectory], memory_bytes: int | None, asked_bytes: int | None) -> Placement:
    """Returns the room for the cache, and its capacity; path None: no room can be used.

    rooms: best first. memory_bytes: what the host and its control groups have left; None: unknown. Only the first
    room, shared memory, takes from it. asked_bytes: the capacity requested; None: a share of what is free.
    """
    best: Placement | None = None
    for number, room in enumerate(rooms):
        if room.free_bytes is None:
            continue
        free = room.free_bytes
        if number == 0 and memory_bytes is not None:
            free = min(free, memory_bytes)
        usable = (
            min(int(free * DEFAULT_SHARE), free - KEPT_FREE_BYTES)
            if asked_bytes is None
            else free - KEPT_FREE_BYTES
        )
        if asked_bytes is not None and usable >= asked_bytes:
            return Placement(room.path, asked_bytes, f"{asked_bytes} bytes fit into {room.path}")
        if asked_bytes is None and usable >= LEAST_BYTES * 256:
            return Placement(room.path, usable, f"{DEFAULT_SHARE:g} of what is free in {room.path}")
        if usable >= LEAST_BYTES and (best is None or usable > best.capacity_bytes):
            best = Placement(room.path, usable, f"{room.path} has room for {usable} bytes and no more")
    looked_at = " or ".join(str(room.path) for room in rooms)
    return best or Placement(None, 0, f"there is no room in {looked_at}, or it cannot be used")


def redis_bytes(memory_bytes: int | None, asked_bytes: int | None) -> int:
    """Returns the capacity of a Redis that is started here. memory_bytes: see place."""
    if asked_bytes is not None:
        return asked_bytes
    free = UNKNOWN_MEMORY_BYTES if memory_bytes is None else memory_bytes
    return max(LEAST_BYTES, int(free * DEFAULT_SHARE))
