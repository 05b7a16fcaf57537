"""Finds the control groups that account the memory of a process: version 1, version 2, or hybrid.

Pure: the text of /proc/self/cgroup and of /proc/self/mountinfo are arguments, and no file of a group is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class MemoryCgroups:
    """The groups that account a process's memory.

    version: 1 or 2, of the hierarchy that has the memory controller.
    folders: of the process's own group, then of its ancestors up to the mount.
    """

    version: int
    folders: tuple[PurePosixPath, ...]


def memory_cgroups(cgroups: str, mounts: str) -> MemoryCgroups | None:
    """Returns the groups of a process's memory; None if no such group is visible.

    cgroups, mounts: the text of /proc/self/cgroup and of /proc/self/mountinfo.
    """
    groups = {}
    for line in cgroups.splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            groups[2] = group
        elif "memory" in controllers.split(","):
            groups[1] = group
    # Version 1 first: in a hybrid system, the hierarchy of version 2 exists without this controller.
    for version in sorted(groups):
        if folders := _folders(groups[version], list(_mounts(mounts, version))):
            return MemoryCgroups(version, folders)
    return None


def _folders(group: str, mounts: list[tuple[PurePosixPath, PurePosixPath]]) -> tuple[PurePosixPath, ...]:
    """Returns the folders of the process's own group and of its ancestors, as far as they are visible.

    The newest mount counts, for it may hide others. A container's mount may show another part of the hierarchy than the
    path of its group names; its top is then the nearest group that can be read.
    """
    if not mounts:
        return ()
    for root, place in reversed(mounts):
        if PurePosixPath(group).is_relative_to(root):
            below = PurePosixPath(group).relative_to(root)
            if ".." not in below.parts:  # outside the root of this cgroup namespace
                own = place / below
                return (own, *(parent for parent in own.parents if parent.is_relative_to(place)))
    return (mounts[-1][1],)


def _mounts(mounts: str, version: int) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Yields (group at the mount's top, place of the mount) of each hierarchy that can have the memory controller."""
    for line in mounts.splitlines():
        fields, _, of_system = line.partition(" - ")
        kind, _, options = of_system.split(" ", 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(","):
            _, _, _, root, place = fields.split(" ")[:5]
            yield PurePosixPath(_unescaped(root)), PurePosixPath(_unescaped(place))


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
