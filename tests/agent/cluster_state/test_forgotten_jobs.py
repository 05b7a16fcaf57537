"""A scheduler's picture keeps nothing of jobs whose keys are gone: it lives for months, and jobs come and go."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_contract import cluster_pb2 as pb
from tests.agent.cluster_state.test_odd_records import submission

JOBS = 500
OUTCOME = pb.JobOutcome(outcome=pb.JobOutcome.SUCCEEDED).SerializeToString()


def bytes_of(value: object, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, type) or callable(value):
        return 0
    seen.add(id(value))
    parts: Iterator[object] = iter(())
    if isinstance(value, dict):
        parts = iter((*value.keys(), *value.values()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = iter(value)
    elif hasattr(value, "__dict__"):
        parts = iter(vars(value).values())
    return sys.getsizeof(value) + sum(bytes_of(part, seen) for part in parts)


def life(job_id: str) -> list[Change]:
    """The changes of one job's keys, in the order in which agents, the scheduler and its retention make them."""
    keys = JobKeys(job_id)
    own = [
        keys.spec,
        keys.event("created"),
        keys.agent("a"),
        keys.member("a.0.w"),
        keys.generation,
        keys.result,
    ]
    puts = [(key, b"") for key in own]
    records = {cluster_keys.submission(job_id): submission(job_id), cluster_keys.outcome(job_id): OUTCOME}
    leaving = [(keys.member("a.0.w"), None), (keys.agent("a"), None)]
    rest = [*records, keys.spec, keys.event("created"), keys.generation, keys.result]
    told = [*puts, *records.items(), *leaving, *((key, None) for key in rest)]
    return [Change(key, value, number, number) for number, (key, value) in enumerate(told, 1)]


def test_a_job_whose_keys_are_gone_takes_no_memory() -> None:
    picture = ClusterPicture(0.0, pytest.fail)
    picture.take(life("warm-up"), 0.0)
    before = bytes_of(picture, set())
    for number in range(JOBS):
        picture.take(life(f"job-{number}"), float(number))
    assert picture.view().submissions == () and picture.left_jobs() == frozenset()
    grown = bytes_of(picture, set()) - before
    assert grown < 10 * JOBS, f"{grown / JOBS:.0f} bytes a job"


def test_the_keys_of_a_job_that_ended_are_known_as_long_as_its_outcome() -> None:
    """An agent that came and went between two looks may have left the job's key pair."""
    picture = ClusterPicture(0.0, pytest.fail)
    agent = JobKeys("demo").agent("a")
    picture.take([Change(cluster_keys.outcome("demo"), OUTCOME, 1, 1)], 0.0)
    assert picture.left_jobs() == {("demo", 0)}
    picture.take([Change(agent, b"", 2, 2), Change(agent, None, 3, 2)], 0.0)
    assert picture.left_jobs() == {("demo", 1)}
