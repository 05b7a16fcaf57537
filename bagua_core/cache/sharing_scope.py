"""Decides which processes share a cache: on a node, those of one job, or else this process and its children; on
given servers, all processes that use the same name.

The scope on a node is unique to one run of one job, so what an earlier run left behind is never taken for this one's.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from bagua_contract.environment import WorkerEnvironment, variable

FORMAT = 3  # of the files in the directory, and of the frames
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_alone = (0, "")


@dataclass(frozen=True, slots=True)
class Scope:
    """The processes that share a cache.

    name: of the run. shared: whether other processes than this one's children know it.
    """

    name: str
    shared: bool
    reason: str


def scope_of(environ: Mapping[str, str], parent_pid: int) -> Scope:
    """Returns the scope that this environment gives."""
    if WorkerEnvironment.is_present(environ):
        agent = environ.get(variable("agent_id"), "")
        return Scope(f"agent-{agent}", True, "the workers of this node's agent")
    if _TORCHRUN in environ:
        # the run's id may be "none", so the launcher's process identifies the run
        started = _start_time(parent_pid)
        return Scope(
            f"torchrun-{environ[_TORCHRUN]}-{parent_pid}-{started}",
            True,
            "torchrun's workers here",
        )
    return Scope(_name_of_this_process(), False, "this process and its children")


def scope_on_servers(environ: Mapping[str, str], parent_pid: int, dataset_name: str) -> str:
    """Returns the name of the scope on given servers; empty for a data set with a name.

    Servers outlive a job, and what another job computed under this name and fingerprint is the same. Without a name,
    data sets of one type and length could be anything: the job keeps to itself, all its nodes together if it has an id.
    """
    if dataset_name:
        return ""
    if WorkerEnvironment.is_present(environ):
        return f"job-{environ.get(variable('job_id'), '')}"
    run = environ.get(_TORCHRUN, "none")
    return scope_of(environ, parent_pid).name if run == "none" else f"torchrun-{run}"


def directory_name(kind: str, dataset_name: str, fingerprint: str, scope: str) -> str:
    """Returns a readable directory name, different for all caches that must not be mixed up."""
    told = "\0".join((str(FORMAT), kind, dataset_name, fingerprint, scope))
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", dataset_name)[:24].strip(".") or "unnamed"
    return f"{readable}-{blake2b(told.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"


def _name_of_this_process() -> str:
    global _alone
    if _alone[0] != os.getpid():
        _alone = (os.getpid(), f"process-{uuid.uuid4().hex}")
    return _alone[1]


def _start_time(pid: int) -> str:
    """Returns when the process started, in ticks since boot; it tells apart two processes of one number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "unknown"
