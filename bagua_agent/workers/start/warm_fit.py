"""Decides whether a worker may be forked from the warm parent, and when a dead warm parent starts again. Pure.

A fork inherits what libraries read when they were loaded, so it may differ from its parent only in variables that are
known to be read later. Any other worker is spawned.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.backoff import delay_s
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.account import Account

# Variables that differ from worker to worker. They are read by the script, torch.distributed or bagua_core
# when they are used, not when a library is loaded.
READ_LATE = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*"),
    *("CUDA_VISIBLE_DEVICES", "BAGUA_*"),
)
WARM_START_METHODS = ("warm", "fork", "forkserver")

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
MAX_DEATHS_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class StartPlace:
    """The conditions with which a process is started. env: its whole environment. python: its interpreter. account:
    None for ours.

    stays: it starts where this process is, whatever the name `directory` means by then.
    """

    env: Mapping[str, str]
    directory: Path
    python: str
    preimport: tuple[str, ...]
    account: Account | None = None
    stays: bool = False

    @property
    def goes_to(self) -> Path | None:
        """The directory for subprocess.Popen, which changes into it before it changes the account; None if the process
        stays."""
        return None if self.stays else self.directory


def why_not_forked(
    parent: StartPlace, wanted: StartPlace, *, bound_to_processors: bool = False
) -> str | None:
    """Returns why a fork of a process started with `parent` can't replace a start with `wanted`; None if it can."""
    if wanted.python != parent.python:
        return f"its interpreter is {wanted.python}"
    if wanted.account != parent.account:
        return f"it runs as {'the agent' if wanted.account is None else wanted.account.name}"
    if wanted.directory != parent.directory:
        return f"its directory is {wanted.directory}"
    if not set(wanted.preimport) <= set(parent.preimport):
        return "it imports other modules"
    for name in sorted(parent.env.keys() | wanted.env.keys()):
        if parent.env.get(name) != wanted.env.get(name) and not _is_read_late(name):
            return f"its {name} differs"
    if bound_to_processors and "OMP_NUM_THREADS" not in wanted.env:
        return "its number of threads follows from its processors"  # counted when OpenMP is loaded
    return None


def _is_read_late(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in READ_LATE)


def can_be_warm(command: WorkerCommand, start_method: str) -> bool:
    """Tells whether this command's workers start from a warm parent at all."""
    return start_method in WARM_START_METHODS and command.kind is not CommandKind.EXECUTABLE


def restart_delay_s(deaths_in_a_row: int) -> float | None:
    """Returns how long after its death the warm parent is started again; None: no more."""
    if deaths_in_a_row > MAX_DEATHS_IN_A_ROW:
        return None
    return delay_s(max(1, deaths_in_a_row), FIRST_DELAY_S, MAX_DELAY_S)
