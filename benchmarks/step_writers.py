"""Finds the worker among a host's processes: the one that has a step log open, under every system."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.lab.network import Host

SUFFIX = ".jsonl"


def writers_on(host: Host, directory: Path) -> list[tuple[int, str]]:
    """(process id, name of its log without the suffix) of each process on `host` with a log in `directory` open."""
    inside = f"{directory}/"
    return [
        (pid, Path(target).stem)
        for pid in host.pids()
        for target in _open_files(pid)
        if target.startswith(inside) and target.endswith(SUFFIX)
    ]


def _open_files(pid: int) -> list[str]:
    found = []
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []  # it has ended
    for descriptor in descriptors:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed while we looked
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found
