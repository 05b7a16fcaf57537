"""The parts of an agent know what they need of each other, and none is used after it was closed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from bagua_agent.base.timers import Timers
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import CommandKind, JobConfig, StoreCredentials, WorkerCommand
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job.assembly import Agent, Joining, NodeParts, assemble
from bagua_agent.job.create_or_join import JobFound
from bagua_agent.job.new_identity import make_identity
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement
from tests.lab.wait import HANG_S


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    store.connect(HANG_S)
    yield store
    store.close()


def some_agent(store: Store, opened: ExitStack, spec: pb.JobSpec, *, is_stuck: bool = False) -> Agent:
    keys = JobKeys("job")
    config = JobConfig("job", WorkerCommand(CommandKind.SCRIPT, "train.py"))
    some: Any = SimpleNamespace(worker_ids=(), output=None, traces=None, tell_disagreement=None)
    node = NodeParts(config, "a", "h1", some, queue.SimpleQueue(), keys, some, Timers(lambda: None), some)
    joining = Joining(
        store,
        "127.0.0.1",
        JobFound(spec, make_identity("job"), nodes=1),
        opened,
        hosts_store=False,
        dashboard="",
        on_event=lambda key, value: None,
        is_stuck=lambda: is_stuck,
    )
    return assemble(node, joining)


def test_a_write_under_way_may_remove_leased_keys_while_the_agent_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes how a worker ended, and then removes the worker's key."""
    begun, closing, closed = threading.Event(), threading.Event(), threading.Event()
    close = LeasedKeys.close

    def close_and_tell(leased: LeasedKeys) -> None:
        close(leased)
        closed.set()

    monkeypatch.setattr(LeasedKeys, "close", close_and_tell)
    with ExitStack() as opened:
        agent = some_agent(store, opened, pb.JobSpec(nonce="n"))
        opened.callback(closing.set)

        def write() -> None:
            begun.set()
            assert closing.wait(HANG_S)
            closed.wait(0.3)  # in which the leased keys are closed, if they do not wait for this write
            agent.job.leased.remove(agent.job.keys.member("a.0.x"))

        agent.job.writes.until_done("departed a.0.x", write)
        assert begun.wait(HANG_S)
    assert closed.is_set() and "used after they were closed" not in caplog.text


def generation_of(nodes: int) -> Generation:
    members = tuple(
        Placement(f"w{n}", f"agent-{n}", "h", 0, n, n, 0, "h:1", 1, 1, True) for n in range(nodes)
    )
    return Generation(1, 0, GenerationKind.PLANNED, members)


@pytest.mark.parametrize("nodes", [1, 100])
def test_a_stuck_agent_in_restart_mode_holds_its_lease_if_the_record_has_other_nodes(
    nodes: int, store: Store
) -> None:
    """In a large job its picture has no other agents."""
    with ExitStack() as opened:
        spec = pb.JobSpec(nonce="n", mode=pb.JobSpec.RESTART)
        job = some_agent(store, opened, spec, is_stuck=True).job
        job.seen.whole = False
        job.seen.generation = generation_of(nodes)
        leased: Any = job.leased
        assert leased._is_held() == (nodes > 1)
