"""The events of a job are in the store afterwards, once each and in order."""

from __future__ import annotations

from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.history.job_history import EventKind, JobEvent, events_of
from tests.faults.conftest import MakeJob


def read(etcd: EmbeddedEtcd, job_id: str) -> list[JobEvent]:
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    try:
        keys = JobKeys(job_id)
        return events_of(store.get_prefix(keys.events)[0], keys)
    finally:
        store.close()


def test_a_job_tells_its_story(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1")
    node = one.start(slots=2)
    one.await_world(2)
    killed = node.workers[1]
    killed.kill()
    one.await_world(1)
    one.await_world(2, after_step=one.last_world(1))
    one.finish()
    story = read(etcd, one.job_id)
    kinds = [event.kind for event in story]
    assert kinds[0] is EventKind.JOB_CREATED
    assert kinds[-1] is EventKind.JOB_ENDED and "succeeded" in story[-1].text
    assert kinds.count(EventKind.NODE_JOINED) == kinds.count(EventKind.WORKER_LOST) == 1
    lost = next(event for event in story if event.kind is EventKind.WORKER_LOST)
    assert lost.worker_id == killed.worker_id and "SIGKILL" in lost.text
    formed = [event for event in story if event.kind is EventKind.GENERATION_FORMED]
    assert [event.generation for event in formed] == list(range(1, len(formed) + 1))
    assert {event.generation_kind for event in formed} == {"GATHERING", "PLANNED", "FAILOVER"}
    assert all(event.time_unix_s > 1e9 and event.node_name for event in story)
