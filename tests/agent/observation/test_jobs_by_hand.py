"""The status of a job that was started by hand, whose record may be a head with parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from bagua_agent.cluster_client.started_jobs import started_job
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import stored
from bagua_agent.observation.jobs_by_hand import status_of
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement

KEYS = JobKeys("demo")
WORKERS, SIZE = 8, 2
SHOWN = "generation 3; 4 replicas of 2 workers; 1 node present"


def records(*, large: bool) -> list[KeyValue]:
    """All keys of a job with replicas. large: its record is stored in parts."""
    members = tuple(
        Placement(f"w{r}", "a", "host-a", r, r, r, 0, "h:1", 1, 10 + r, True, *divmod(r, SIZE))
        for r in range(WORKERS)
    )
    form = stored(
        Generation(3, 2, GenerationKind.PLANNED, members, "n"),
        KEYS,
        Limits(whole_record_members=WORKERS - 1 if large else WORKERS),
    )
    values = {
        KEYS.spec: pb.JobSpec(replica_size=SIZE).SerializeToString(),
        KEYS.agent("a"): pb.Agent(node_name="host-a").SerializeToString(),
        KEYS.generation: form.value,
        **{part.key: part.value for part in form.parts},
    }
    assert bool(form.parts) is large
    return [KeyValue(key, value, 1, 1) for key, value in sorted(values.items())]


def store_of(stored_keys: list[KeyValue]) -> Store:
    def get_prefix(prefix: str, timeout_s: float | None = None) -> tuple[list[KeyValue], int]:
        return [kv for kv in stored_keys if kv.key.startswith(prefix)], 1

    return cast(Store, SimpleNamespace(get_prefix=get_prefix))


def test_replicas_are_counted_where_the_record_is_whole() -> None:
    job = status_of("demo", records(large=False))
    assert job is not None and (job.state, job.reason) == ("running", SHOWN)


def test_the_head_of_a_large_record_gives_no_count() -> None:
    job = status_of("demo", records(large=True))
    assert job is not None and (job.state, job.reason) == ("running", "generation 3; 1 node present")


def test_the_parts_are_read_where_one_job_is_asked_for() -> None:
    job = started_job(store_of(records(large=True)), "demo")
    assert job is not None and job.reason == SHOWN


def test_a_record_that_is_replaced_meanwhile_gives_no_count() -> None:
    without_parts = [kv for kv in records(large=True) if not kv.key.startswith(KEYS.records)]
    job = started_job(store_of(without_parts), "demo")
    assert job is not None and job.reason == "generation 3; 1 node present"
