"""Reads files that a worker wrote, or that a job's submitter named: ordinary ones only, so much of them at most.

A FIFO would make the reader wait for ever, a device may do something when it is opened, and a file's size is its
writer's to choose; the agent, which may be root, must be safe from each.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bagua_agent.base.errors import UserError

# Of anything that a worker writes for its agent: an error file is some kilobytes.
MOST_BYTES = 1 << 20


_KINDS = {
    stat.S_IFREG: "an ordinary file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class UnusableFile(UserError, OSError):
    """Raised for a file that is no ordinary one, or larger than may be read; strerror says which."""


def kind_of(mode: int) -> str:
    """Returns the kind of a file in words, from st_mode."""
    return _KINDS.get(stat.S_IFMT(mode), "of unknown kind")


def why_no_script(path: Path) -> str | None:
    """Returns what `path` is instead of a file or directory that Python can run; None if it may be one. Opens nothing.

    Raises OSError if it can't be looked at.
    """
    mode = path.stat().st_mode
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else kind_of(mode)


def read_ordinary(path: Path, most_bytes: int = MOST_BYTES, *, follow_links: bool = False) -> bytes:
    """Returns the whole content. Raises UnusableFile, or the OSError of what can't be opened.

    follow_links: for paths that a person gave; a worker's own are never links.
    """
    # O_PATH opens nothing that would notice, and what it opened can't be exchanged before it is looked at.
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    place = os.open(path, flags)
    try:
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode):
            raise UnusableFile(0, f"it is {kind_of(found.st_mode)}, no ordinary file", str(path))
        if found.st_size > most_bytes:
            raise UnusableFile(0, f"it has {found.st_size} bytes, more than {most_bytes}", str(path))
        descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnusableFile(0, f"it grew beyond {most_bytes} bytes", str(path))
    return content
