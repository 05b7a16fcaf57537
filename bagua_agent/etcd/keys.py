"""Keys of one job in etcd, under /bagua/v1/jobs/<job>/ and beside it, as in docs/design/membership.md. Pure.

Ids become parts of keys, so they are checked here: no slash, no control character, never "." or "..".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

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


class AfterLoss(Enum):
    """How a key comes back once the store has lost the job's keys. lost_store/recreation.py carries it out."""

    PUT_AGAIN = "an agent that remembers the value puts it again"
    PUT_OVER_A_NEW_JOB = "the same, also over the key of a job that was begun anew and has not trained"
    NEWEST_RECORD = "an agent that remembers the highest generation puts it again"
    WITH_SPEC = "the agent that puts the spec again puts it too"
    LEASED = "the agent that keeps it under its lease puts it again"
    STAYS_LOST = "no agent puts it again for the loss"


class Removal(Enum):
    """What removes a key, besides the part of the job that writes it."""

    WITH_JOB = "the removal of the job's ranges, as of all keys"
    WITH_RESULT = "the job's result, or the last agent of a job without one"
    WITH_LEADER = "the death of the leader"
    WITH_AGENT = "the death of the agent"
    WITH_AGENTS_WORKERS = "the death of the agent whose worker it is about"


class JobKey:
    """A row of the table of keys: a key or folder of a job at a fixed place below one of its prefixes.

    As an attribute of a JobKeys it is that job's key, or the folder of its keys.
    """

    name: str  # in JobKeys

    def __init__(
        self,
        place: str,
        after_loss: AfterLoss = AfterLoss.STAYS_LOST,
        removal: Removal = Removal.WITH_JOB,
        prefix: str = "prefix",
    ) -> None:
        self.place = place
        self.after_loss = after_loss
        self.removal = removal
        self.prefix = prefix

    def __set_name__(self, owner: type[JobKeys], name: str) -> None:
        self.name = name

    def __get__(self, keys: JobKeys, owner: type[JobKeys]) -> str:
        return f"{getattr(keys, self.prefix)}{self.place}"

    @property
    def is_folder(self) -> bool:
        """Whether it holds a key for each id."""
        return self.place.endswith("/")


class JobKeys:
    """The keys of one job, as KEY_TABLE lists them. Raises UserError for an id that may not be part of a key."""

    __slots__ = ("job_id", "prefix", "records", "secrets")

    spec = JobKey("control/spec", AfterLoss.PUT_OVER_A_NEW_JOB)
    desired = JobKey("control/desired", AfterLoss.PUT_OVER_A_NEW_JOB)
    settings = JobKey("control/settings", AfterLoss.PUT_OVER_A_NEW_JOB)
    leader = JobKey("control/leader", AfterLoss.LEASED, Removal.WITH_LEADER)
    generation = JobKey("control/generation", AfterLoss.NEWEST_RECORD)
    meeting = JobKey("control/meeting")
    hang = JobKey("control/hang")
    closing = JobKey("control/closing", AfterLoss.PUT_AGAIN)
    stop = JobKey("control/stop")
    result = JobKey("control/result", AfterLoss.PUT_AGAIN)
    agents = JobKey("agents/", AfterLoss.LEASED, Removal.WITH_AGENT)
    members = JobKey("members/", AfterLoss.LEASED, Removal.WITH_AGENTS_WORKERS)
    suspicions = JobKey("suspicions/", AfterLoss.LEASED, Removal.WITH_AGENTS_WORKERS)
    failures = JobKey("failures/")
    finished_workers = JobKey("finished/")
    departures = JobKey("departed/")
    refusals = JobKey("refused/")
    replicas = JobKey("replicas/", AfterLoss.PUT_AGAIN)  # by the agents with workers in the replica
    events = JobKey("events/")
    measured = JobKey("tuning/measured")  # not for every agent: the leader alone acts on these
    study = JobKey("tuning/study")
    # the job's key pair
    identity = JobKey("identity", AfterLoss.WITH_SPEC, Removal.WITH_RESULT, prefix="secrets")

    def __init__(self, job_id: str) -> None:
        self.job_id = check_id("job", job_id)
        self.prefix = f"{JOBS_PREFIX}{job_id}/"
        self.records = f"{RECORDS_PREFIX}{job_id}/"
        self.secrets = f"{SECRETS_PREFIX}{job_id}/"

    @property
    def control(self) -> str:
        """The folder of the keys that concern every agent."""
        return f"{self.prefix}control/"

    @property
    def ranges(self) -> list[KeyRange]:
        """The ranges of all keys of the job, without the cluster's keys about it."""
        return [KeyRange.of_prefix(prefix) for prefix in (self.prefix, self.records, self.secrets)]

    def after_loss(self, *rules: AfterLoss) -> frozenset[str]:
        """Returns the keys that come back by one of these rules, without the folders of keys."""
        rows = KEY_TABLE.values()
        return frozenset(
            row.__get__(self, JobKeys) for row in rows if row.after_loss in rules and not row.is_folder
        )

    def removed(self, removal: Removal) -> tuple[str, ...]:
        """Returns the keys, and the folders of keys, that are removed in this way."""
        return tuple(row.__get__(self, JobKeys) for row in KEY_TABLE.values() if row.removal is removal)

    def row_of(self, key: str) -> tuple[JobKey, str] | None:
        """Returns the row of the table that `key` belongs to and the id in it, which is empty for a single key; None
        for a key outside the table."""
        for prefix in ("prefix", "secrets"):
            below = getattr(self, prefix)
            if key.startswith(below):
                place = key[len(below) :]
                folder, slash, owner = place.partition("/")
                if (row := _ROWS.get((prefix, place))) is not None and not row.is_folder:
                    return row, ""
                if (row := _ROWS.get((prefix, folder + slash))) is not None and is_id(owner):
                    return row, owner
        return None

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


# One row for each key of a job, by its name in JobKeys: how it comes back after a loss, and what removes it.
# job_state/decode.py has the decoder of each row.
KEY_TABLE: Mapping[str, JobKey] = {row.name: row for row in vars(JobKeys).values() if isinstance(row, JobKey)}
_ROWS = {(row.prefix, row.place): row for row in KEY_TABLE.values()}
