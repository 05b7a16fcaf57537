"""Makes the identity of a new job: runs the program that makes a key pair (rpc/key_pair.py), bounded in time."""

from __future__ import annotations

import os
import sys

from bagua_agent.base.errors import InfrastructureLost, host_error
from bagua_agent.rpc import key_pair
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_agent.workers.process.bounded_run import run_bounded

WITHIN_S = 30.0
_WHAT = "can't make the job's key pair"


def make_identity(job_id: str, within_s: float = WITHIN_S) -> JobIdentity:
    """Makes a new identity. Waits for the program. Raises InfrastructureLost, UserError."""
    # -P: the folder of the program is no place for imports
    command = [sys.executable, "-P", key_pair.__file__]
    try:
        # A Ctrl-C is for this process, which joins no job then, or leaves it.
        ended = run_bounded(command, within_s, own_group=True, variables={"PYTHONPATH": _own_path()})
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise InfrastructureLost(f"{_WHAT}: {error}") from error
        raise host_error(
            error, f"{_WHAT}: {sys.executable} does not start", "check the installation"
        ) from error
    if ended.returncode != 0:
        last = ended.output.strip().rpartition("\n")[2]
        raise InfrastructureLost(f"{_WHAT}: its program ended with {ended.returncode}: {last[:200]}")
    printed = ended.output[ended.output.find("-----BEGIN") :]  # behind the warnings of an interpreter
    try:
        return JobIdentity.decode(job_id, printed.encode())
    except ValueError as error:
        raise InfrastructureLost(f"{_WHAT}: its program printed something else ({error})") from error


def _own_path() -> str:
    """Returns the places from which this process imports, for a program that runs in another folder."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
