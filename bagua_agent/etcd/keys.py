"""Keys of one job in etcd, under /bagua/v1/jobs/<job>/ and beside it, as in docs/design/membership.md. Pure.

Ids become parts of keys, so they are checked here: no slash, no control character, never "." or "..".
"""

from __future__ import annotations

from bagua_agent.base.errors import UserError
from bagua_agent.base.ids import LONGEST_ID, is_id

JOBS_PREFIX = "/bagua/v1/jobs/"
# Beside the jobs: no agent watches these, they are read when a head points to them.
RECORDS_PREFIX = "/bagua/v1/records/"
# What agents of a job may know and viewers may not.
SECRETS_PREFIX = "/bagua/secrets/v1/jobs/"


def check_id(kind: str, value: str) -> str:
    """`value`, if it may be part of a key. Raises UserError naming it."""
    if not is_id(value):
        raise UserError(
            f"{kind} id {value!r} is not allowed; use 1 to {LONGEST_ID} of A-Z a-z 0-9 . _ - "
            f"(but not '.' or '..')"
        )
    return value


class JobKeys:
    """Every key of one job. Raises UserError for an id that may not be part of a key."""

    __slots__ = ("job_id", "prefix")

    def __init__(self, job_id: str) -> None:
        self.job_id = check_id("job", job_id)
        self.prefix = f"{JOBS_PREFIX}{job_id}/"

    @property
    def spec(self) -> str:
        return self.prefix + "control/spec"

    @property
    def secrets(self) -> str:
        return f"{SECRETS_PREFIX}{self.job_id}/"

    @property
    def identity(self) -> str:
        """The job's key pair."""
        return self.secrets + "identity"

    @property
    def control(self) -> str:
        """What concerns every agent."""
        return self.prefix + "control/"

    @property
    def desired(self) -> str:
        return self.prefix + "control/desired"

    @property
    def leader(self) -> str:
        return self.prefix + "control/leader"

    @property
    def generation(self) -> str:
        return self.prefix + "control/generation"

    @property
    def meeting(self) -> str:
        return self.prefix + "control/meeting"

    @property
    def hang(self) -> str:
        return self.prefix + "control/hang"

    @property
    def closing(self) -> str:
        return self.prefix + "control/closing"

    @property
    def result(self) -> str:
        return self.prefix + "control/result"

    @property
    def agents(self) -> str:
        return self.prefix + "agents/"

    @property
    def members(self) -> str:
        return self.prefix + "members/"

    @property
    def suspicions(self) -> str:
        return self.prefix + "suspicions/"

    @property
    def failures(self) -> str:
        return self.prefix + "failures/"

    @property
    def finished_workers(self) -> str:
        return self.prefix + "finished/"

    @property
    def departures(self) -> str:
        return self.prefix + "departed/"

    @property
    def refusals(self) -> str:
        return self.prefix + "refused/"

    @property
    def events(self) -> str:
        return self.prefix + "events/"

    def agent(self, agent_id: str) -> str:
        return self.agents + check_id("agent", agent_id)

    def member(self, worker_id: str) -> str:
        return self.members + check_id("worker", worker_id)

    def suspicion(self, worker_id: str) -> str:
        return self.suspicions + check_id("worker", worker_id)

    def failure(self, worker_id: str) -> str:
        return self.failures + check_id("worker", worker_id)

    def finished(self, worker_id: str) -> str:
        return self.finished_workers + check_id("worker", worker_id)

    def departed(self, worker_id: str) -> str:
        return self.departures + check_id("worker", worker_id)

    def refused(self, worker_id: str) -> str:
        return self.refusals + check_id("worker", worker_id)

    def event(self, name: str) -> str:
        return self.events + check_id("event", name)

    @property
    def records(self) -> str:
        return f"{RECORDS_PREFIX}{self.job_id}/"

    def record_folder(self, folder: str) -> str:
        return f"{self.records}{check_id('record', folder)}/"

    def record_part(self, folder: str, index: int) -> str:
        return f"{self.record_folder(folder)}{index:06d}"

    @staticmethod
    def id_in(folder: str, key: str) -> str | None:
        """The id in `key` if it lies directly in `folder` (`keys.members`, ...), else None."""
        if not key.startswith(folder):
            return None
        tail = key[len(folder) :]
        return tail if is_id(tail) else None

    @staticmethod
    def job_in(key: str) -> str | None:
        """The id of the job that `key` belongs to; None if no job can have it."""
        job_id, slash, _ = key.removeprefix(JOBS_PREFIX).partition("/")
        return job_id if key.startswith(JOBS_PREFIX) and slash and is_id(job_id) else None
