"""A third party writes garbage over the keys of a running job: said once, and the job trains on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bagua_agent.etcd.client import Store, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob
from tests.lab.wait import eventually

GARBAGE = b"\xff\xff\xff"


@pytest.fixture
def store(etcd_endpoint: str) -> Iterator[Store]:
    store = Store(StoreConfig(parse_endpoints(etcd_endpoint)))
    store.connect(5.0)
    yield store
    store.close()


def test_garbage_over_each_kind_of_key(job: MakeJob, store: Store, etcd_endpoint: str) -> None:
    one = job(endpoints=etcd_endpoint, nodes="1:2", script=["--step-s", "0.5"])
    node = one.start(slots=2)
    one.await_world(2)
    node.await_line("is in force")
    keys = JobKeys(one.job_id)
    pids = [worker.pid for worker in node.workers]
    workers = [worker.worker_id for worker in node.workers]
    [agent_key] = [kv.key for kv in store.get_prefix(keys.agents)[0]]
    overwritten = [
        keys.desired,
        keys.leader,
        keys.generation,
        keys.result,
        agent_key,
        *map(keys.member, workers),
        *map(keys.suspicion, workers),
        *map(keys.failure, workers),
        keys.agents + "nobody",
        keys.members + "nobody",
    ]
    for key in overwritten:
        store.put(key, GARBAGE)
        node.await_line("passing over", key)
        store.put(key, GARBAGE + b"\xff")
    for key in (
        keys.agents + "..",
        keys.members + "a/b",
        keys.prefix + "control/else",
        keys.prefix + "events/1",
    ):
        store.put(key, GARBAGE)
    after = one.step
    one.await_step(after + 5)
    for key in overwritten:
        assert sum("passing over " + key + ":" in line for line in node.log.splitlines()) == 1, key
    # what the line recommends
    store.delete(keys.result)
    one.finish()
    one.check(finished=2)
    assert [line.world_size for line in one.ledger.lines] == [2] * len(one.ledger.lines)
    assert len({line.generation for line in one.ledger.lines}) == 1, "no worker was taken for lost"
    assert len(pids) == 2 and not node.says("Traceback") and not node.says("did not happen")


@pytest.mark.parametrize("kind", ["generation", "closing", "leader", "result"])
def test_after_garbage_membership_still_changes(
    job: MakeJob, store: Store, etcd_endpoint: str, kind: str
) -> None:
    one = job(endpoints=etcd_endpoint, nodes="1:2")
    node = one.start(slots=2)
    one.await_world(2)
    node.await_line("is in force")
    key: str = getattr(JobKeys(one.job_id), kind)
    store.put(key, GARBAGE)
    node.await_line("passing over", key)
    before = one.last_world(2)
    node.workers[1].kill()
    alone = one.await_world(1, after_step=before, deadline_s=10)
    one.await_world(2, after_step=alone, deadline_s=20)
    one.finish()
    one.check(finished=2)


@pytest.mark.parametrize("kind", ["spec", "generation"])
def test_what_members_remember_is_put_again_and_later_nodes_join(
    job: MakeJob, store: Store, etcd_endpoint: str, kind: str
) -> None:
    one = job(endpoints=etcd_endpoint, nodes="1:2")
    first = one.start()
    alone = one.await_world(1)
    first.await_line("is in force")
    key: str = getattr(JobKeys(one.job_id), kind)
    before = store.get(key)
    assert before is not None
    store.put(key, GARBAGE)
    first.await_line("passing over", key)

    read = {"spec": pb.JobSpec, "generation": pb.Generation}[kind].FromString

    def is_put_again() -> bool:
        stands = store.get(key)
        return (
            stands is not None
            and not stands.value.startswith(GARBAGE)
            and read(stands.value) == read(before.value)
        )

    eventually(is_put_again, 10.0, f"{kind} is put again")
    late = one.start()
    one.await_world(2, after_step=alone)
    assert not late.says("Traceback") and not first.says("Traceback")
    one.finish()
    one.check(finished=2)


def test_a_spec_is_put_again_before_any_step_too(job: MakeJob, store: Store, etcd_endpoint: str) -> None:
    """It was once taken for another job's, to which an agent that has trained nothing gives way."""
    one = job(endpoints=etcd_endpoint, nodes="1:2")
    first = one.start()
    first.await_line("this node leads")
    key = JobKeys(one.job_id).spec
    before = store.get(key)
    assert before is not None
    store.put(key, GARBAGE)
    assert not one.ledger.lines, "nothing was trained yet"
    first.await_line("passing over", key)
    eventually(
        lambda: (kv := store.get(key)) is not None and kv.value == before.value, 10.0, "spec is put again"
    )
    one.await_world(1)
    assert not first.says("joining again")
    one.finish()
    one.check(finished=1)
