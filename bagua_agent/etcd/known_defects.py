"""Known defects of etcd's releases that can cost a job's records.

Members of a cluster that run etcd 3.5.0 to 3.5.2 can differ for ever after one of them was killed (etcd #13766), and up
to 3.5.5 after one ended while it defragmented. Agents that ask different members then see different jobs.
"""

from __future__ import annotations

FIRST_AFFECTED, FIRST_SOUND = (3, 5, 0), (3, 5, 6)


def can_diverge(version: str) -> bool:
    """Tells whether members of that release can come to hold different data. version: as etcd tells it; one that is no
    release, as of a build of its own, counts as sound."""
    parts = version.partition("-")[0].split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        return False
    return FIRST_AFFECTED <= tuple(map(int, parts)) < FIRST_SOUND


def warning(version: str, members: int) -> str:
    """Returns a warning for the user; empty for a sound release, and for a single member, which has no other to differ
    from."""
    if members < 2 or not can_diverge(version):
        return ""
    sound = ".".join(map(str, FIRST_SOUND))
    return (
        f"the {members} members of etcd {version} can come to hold different data after one ends unexpectedly, and "
        f"nodes then see different jobs; use {sound} or later"
    )
