"""Reads the counters of Bagua-Net in running processes: bytes, messages, connections, retransmits, stalls.

The plugin keeps them in shared memory that is among the descriptors of its process (`plugin/counters.cc`). So every
NCCL program has them, with or without an agent. Reading costs the process nothing. It needs the same user, or root.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["NoCountersError", "parse", "processes", "read"]

_LINK = "/memfd:bagua-net-counters (deleted)"
_MAGIC = b"BNETCNT1"
_HEAD = struct.Struct("=8sQ")  # magic, number of counters; their values and their names follow
_NAME_BYTES = 32
_MOST_BYTES = 4096
PROC = Path("/proc")


class NoCountersError(RuntimeError):
    """Raised if a process has no counters of Bagua-Net, or they can't be read; the message has the reason."""


def read(pid: int) -> dict[str, int]:
    """Returns the counters of process `pid`, by name. Raises NoCountersError."""
    try:
        for descriptor in sorted((PROC / str(pid) / "fd").iterdir()):
            if _target(descriptor) == _LINK:
                return parse(_content(descriptor))
    except FileNotFoundError as error:
        raise NoCountersError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise NoCountersError(f"process {pid} belongs to another user; read its counters as root") from error
    raise NoCountersError(f"process {pid} has not loaded Bagua-Net")


def parse(content: bytes) -> dict[str, int]:
    """Returns the counters in `content` of the plugin's shared memory, by name. Raises NoCountersError."""
    if len(content) < _HEAD.size or content[: len(_MAGIC)] != _MAGIC:
        raise NoCountersError("its counters are of another version of Bagua-Net")
    count = _HEAD.unpack_from(content)[1]
    if _HEAD.size + count * (8 + _NAME_BYTES) > len(content):
        raise NoCountersError("its counters are incomplete")
    values = struct.unpack_from(f"={count}Q", content, _HEAD.size)
    first = _HEAD.size + 8 * count
    names = [content[first + _NAME_BYTES * i :][:_NAME_BYTES].split(b"\0")[0].decode() for i in range(count)]
    return dict(zip(names, values, strict=True))


def processes() -> Iterator[tuple[int, dict[str, int]]]:
    """Yields every process of this machine whose counters can be read, with its counters."""
    for pid in sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()):
        try:
            yield pid, read(pid)
        except NoCountersError:
            continue  # another program, another user's, or one that has ended


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""  # closed since it was listed


def _content(descriptor: Path) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read(_MOST_BYTES)
