"""Keys of one job in etcd, under /bagua/v1/jobs/<job>/ and beside it, as in docs/design/membership.md. Pure.

Ids become parts of keys, so they are checked here: no slash, no control character, never "." or "..".
"""

from __future__ import annotations

from bagua_agent.base.errors import UserError
from bagua_agent.base.ids import LONGEST_ID, is_id
from bagua_agent.etcd.key_range import KeyRange

JOBS_PREFIX = "/bagua/v1/jobs/"
# Beside the jobs: no agent watches these, they are read when a head points to them.
RECORDS_PREFIX = "/bagua/v1/records/"
# What agents of a job may know and viewers may not.
SECRETS_PREFIX = "/bagua/secrets/v1/jobs/"


def check_id(kind: str, value: str) -> str:
    """Returns `value`, if it may be part of a key. Raises UserError naming it."""
    if not is_id(value):
        raise UserError(
            f"{kind} id {value!r} is not allowed; use 1 to {LONGEST_ID} of A-Z a-z 0-9 . _ - "
            f"(but not '.' or '..')"
        )
    return value


class _Key:
    """The key or folder of a job at a fixed place below one of its prefixes."""

    def __init__(self, place: str, prefix: str = "prefix") -> None:
        self._place = place
        self._prefix = prefix

    def __get__(self, keys: JobKeys, owner: type[JobKeys]) -> str:
        return f"{getattr(keys, self._prefix)}{self._place}"


class JobKeys:
    """The keys of one job. Raises UserError for an id that may not be part of a key."""

    __slots__ = ("job_id", "prefix", "records", "secrets")

    control = _Key("control/")  # what concerns every agent
    spec = _Key("control/spec")
    desired = _Key("control/desired")
    settings = _Key("control/settings")
    leader = _Key("control/leader")
    generation = _Key("control/generation")
    meeting = _Key("control/meeting")
    hang = _Key("control/hang")
    closing = _Key("control/closing")
    stop = _Key("control/stop")
    result = _Key("control/result")
    agents = _Key("agents/")
    members = _Key("members/")
    suspicions = _Key("suspicions/")
    failures = _Key("failures/")
    finished_workers = _Key("finished/")
    departures = _Key("departed/")
    refusals = _Key("refused/")
    replicas = _Key("replicas/")
    events = _Key("events/")
    measured = _Key("tuning/measured")  # not for every agent: the leader alone acts on these
    study = _Key("tuning/study")
    identity = _Key("identity", "secrets")  # the job's key pair

    def __init__(self, job_id: str) -> None:
        self.job_id = check_id("job", job_id)
        self.prefix = f"{JOBS_PREFIX}{job_id}/"
        self.records = f"{RECORDS_PREFIX}{job_id}/"
        self.secrets = f"{SECRETS_PREFIX}{job_id}/"

    @property
    def ranges(self) -> list[KeyRange]:
        """The ranges of all keys of the job, without the cluster's keys about it."""
        return [KeyRange.of_prefix(prefix) for prefix in (self.prefix, self.records, self.secrets)]

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

    def replica(self, replica_id: str) -> str:
        return self.replicas + check_id("replica", replica_id)

    def event(self, name: str) -> str:
        return self.events + check_id("event", name)

    def record_folder(self, folder: str) -> str:
        return f"{self.records}{check_id('record', folder)}/"

    def record_part(self, folder: str, index: int) -> str:
        return f"{self.record_folder(folder)}{index:06d}"

    @staticmethod
    def id_in(folder: str, key: str) -> str | None:
        """Returns the id in `key` if it lies directly in `folder` (`keys.members`, ...), else None."""
        if not key.startswith(folder):
            return None
        tail = key[len(folder) :]
        return tail if is_id(tail) else None

    @staticmethod
    def job_in(key: str) -> str | None:
        """Returns the id of the job that `key` belongs to; None if no job can have it."""
        job_id, slash, _ = key.removeprefix(JOBS_PREFIX).partition("/")
        return job_id if key.startswith(JOBS_PREFIX) and slash and is_id(job_id) else None
