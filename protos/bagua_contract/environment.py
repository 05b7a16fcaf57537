"""The environment variables that an agent passes to a worker: one codec writes them and reads them back.

Owns every BAGUA_* variable that passes from agent to worker, or from the user through the agent. Values are checked
when read, so a worker started by hand with half an environment gets one clear error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

PREFIX = "BAGUA_"
SET_BY_USERS = frozenset({"staging_bytes", "transport", "default_bucket_size"})


class WorkerEnvironmentError(ValueError):
    """A BAGUA_* variable is missing or unreadable."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """The variables that a worker gets; every field is the variable BAGUA_<NAME IN CAPITALS>.

    session_socket: path of the agent's Unix socket. bind_host: this node's address as peers reach it.
    slot: place on the node, fixed for the process's life. virtual_local_rank: 1 if the worker sees one GPU only, as
    device 0; else 0. ledger_dir: empty for none. gate_fd: file
    descriptor on which the runner waits for the agent's word to start the script; -1 for none. stack_fds: the
    two descriptors of the channel through which it is asked for its stacks, FILE,PIPE; empty for none.
    failpoints: see bagua_core/elastic/failpoints.py. minimum waits are in seconds. digest_every_steps: 0 for never.
    checkpoint_dir: empty for none. checkpoint_every: see checkpoint_every.py; needed with a checkpoint_dir. What a job
    does unless told otherwise is the agent's to say, which writes every field (job_config.py).
    staging_bytes: the most that a copy of the job's state may take beside the live one (0: always copy in place); -1:
    as much as there is. transport: what carries tensors of a GPU, see bagua_core/communication/transport_choice.py.
    default_bucket_size: bytes of a bucket of gradients in scripts of the original Bagua, whose name it keeps; -1: the
    core's default. Users set these three; the agent has no options for them. replica_size: workers that together hold
    one copy of the model; 1: each worker holds one. virtual_shards: parts into which a deterministic job cuts each
    global batch; 0: the job is not deterministic.
    """

    job_id: str
    worker_id: str
    agent_id: str
    session_socket: str
    bind_host: str
    slot: int
    slots: int
    ledger_dir: str = ""
    gate_fd: int = -1
    stack_fds: str = ""
    failpoints: str = ""
    digest_every_steps: int = 0
    error_file: str = ""
    checkpoint_dir: str = ""
    checkpoint_every: str = ""
    staging_bytes: int = -1
    transport: str = "auto"
    default_bucket_size: int = -1
    virtual_local_rank: int = 0
    replica_size: int = 1
    virtual_shards: int = 0

    @property
    def local_rank(self) -> int:
        """The index of this worker's GPU among those that it sees, as torchrun's LOCAL_RANK."""
        return 0 if self.virtual_local_rank else self.slot

    def encode(self) -> dict[str, str]:
        """Returns the environment variables that `decode` reads back to an equal value.

        What only users set is left out at its default, or it would hide theirs.
        """
        return {
            variable(f.name): str(value)
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default or f.name not in SET_BY_USERS
        }

    @staticmethod
    def is_present(environ: Mapping[str, str]) -> bool:
        return PREFIX + "SESSION_SOCKET" in environ

    @staticmethod
    def decode(environ: Mapping[str, str]) -> WorkerEnvironment:
        """Reads the fields from variables. Raises WorkerEnvironmentError naming the variable and its value."""
        hints = get_type_hints(WorkerEnvironment)
        values: dict[str, Any] = {}
        for f in fields(WorkerEnvironment):
            name = variable(f.name)
            if name not in environ:
                if isinstance(f.default, (str, int)):
                    continue
                raise WorkerEnvironmentError(f"{name} is not set; start the script with bagua-launch")
            values[f.name] = _read(name, hints[f.name], environ[name])
        return WorkerEnvironment(**values)


def variable(field_name: str) -> str:
    return PREFIX + field_name.upper()


def worker_id_in(environ: Mapping[str, str]) -> str:
    """Returns only the field worker_id; empty for a script that was not launched."""
    return environ.get(variable("worker_id"), "")


def staging_bytes_in(environ: Mapping[str, str]) -> int:
    """Returns only the field staging_bytes, -1 if it is not set. Raises WorkerEnvironmentError."""
    name = variable("staging_bytes")
    return int(_read(name, int, environ[name])) if name in environ else -1


def default_bucket_size_in(environ: Mapping[str, str]) -> int | None:
    """Returns only the field default_bucket_size; None if it is not set. Raises WorkerEnvironmentError."""
    name = variable("default_bucket_size")
    found = int(_read(name, int, environ[name])) if name in environ else -1
    if found == -1:
        return None
    if found < 1:
        raise WorkerEnvironmentError(f"{name}={found} is no number of bytes; leave it out or give at least 1")
    return found


def _read(name: str, kind: type, raw: str) -> Any:
    try:
        return kind(raw)
    except ValueError as error:
        raise WorkerEnvironmentError(f"{name}={raw!r} is not {kind.__name__}") from error
