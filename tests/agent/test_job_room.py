"""The first agent writes the job, the others read it, and a job that has ended makes room: on a real etcd."""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_agent import job_loop as module
from bagua_agent.errors import UserError
from bagua_agent.job_config import CommandKind, JobConfig, StoreCredentials, WorkerCommand
from bagua_agent.job_loop import JobLoop
from bagua_agent.node_workers import NodeWorkers
from bagua_agent.signals import SignalsToInbox
from bagua_agent.store.client import Store
from bagua_agent.store.embedded import EmbeddedEtcd
from bagua_agent.store.keys import JobKeys
from bagua_agent.store_access import store_config
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION

KEYS = JobKeys("job")
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd.start()
    yield server
    server.stop()


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    store.connect(DEADLINE_S)
    store.delete_prefix(KEYS.prefix)
    yield store
    store.close()


@pytest.fixture
def make_agent(etcd: EmbeddedEtcd) -> Iterator[Callable[..., JobLoop]]:
    """Agents that have opened the store and go no further: their workers are none."""
    loops: list[JobLoop] = []
    directories: list[str] = []

    def make(**settings: Any) -> JobLoop:
        directories.append(tempfile.mkdtemp(prefix="bagua-test-"))
        workers = SimpleNamespace(output=SimpleNamespace(say=lambda _: None), worker_ids=[])
        loop = JobLoop(
            JobConfig(
                job_id="job",
                command=WorkerCommand(CommandKind.SCRIPT, "train.py"),
                max_nodes=2,
                endpoints=(etcd.endpoint,),
                **settings,
            ),
            f"agent-{len(loops)}",
            "node",
            "127.0.0.1",
            Path(directories[-1]),
            cast(NodeWorkers, workers),
            queue.SimpleQueue(),
            SignalsToInbox((), lambda number: None),
        )
        assert loop._open_store()
        loops.append(loop)
        return loop

    yield make
    for loop in loops:
        loop.close()
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def result(outcome: int = pb.Result.SUCCEEDED) -> bytes:
    return pb.Result(outcome=outcome, exit_code=0).SerializeToString()  # type: ignore[arg-type]


def keys_of(store: Store) -> set[str]:
    return {kv.key.removeprefix(KEYS.prefix) for kv in store.get_prefix(KEYS.prefix)[0]}


def test_the_first_agent_writes_the_job(make_agent: Callable[..., JobLoop], store: Store) -> None:
    spec = make_agent(max_restarts=3)._ensure_job()
    assert (spec.protocol, spec.max_restarts, spec.script) == (PROTOCOL_VERSION, 3, "train.py")
    assert len(spec.nonce) == 16
    assert keys_of(store) == {"spec", "control/desired"}
    desired = store.get(KEYS.desired)
    assert desired is not None and pb.Desired.FromString(desired.value) == pb.Desired(
        min_nodes=1, max_nodes=2
    )


def test_whoever_comes_later_takes_the_job_as_it_is(make_agent: Callable[..., JobLoop], store: Store) -> None:
    first = make_agent(max_restarts=3)._ensure_job()
    store.put(KEYS.desired, pb.Desired(min_nodes=2, max_nodes=9).SerializeToString())  # scaled meanwhile
    assert make_agent(max_restarts=0)._ensure_job() == first
    desired = store.get(KEYS.desired)
    assert desired is not None and pb.Desired.FromString(desired.value).max_nodes == 9


def test_agents_that_come_together_agree(make_agent: Callable[..., JobLoop], store: Store) -> None:
    loops = [make_agent() for _ in range(6)]
    together = threading.Barrier(len(loops))

    def ensure(loop: JobLoop) -> str:
        together.wait(DEADLINE_S)
        return loop._ensure_job().nonce

    with ThreadPoolExecutor(len(loops)) as pool:
        assert len(set(pool.map(ensure, loops))) == 1


def end_job(store: Store, nonce: str) -> None:
    """What a job leaves behind."""
    store.put(KEYS.generation, b"a generation")
    store.put(KEYS.closing, b"closing")
    store.put(KEYS.failure("w0"), b"a failure")
    store.put(KEYS.finished("w1"), b"\x01")
    store.put(KEYS.refused("w2"), b"a refusal")
    store.put(KEYS.member("w3"), b"a member")
    store.put(KEYS.suspicion("w3"), b"a suspicion")
    store.put(KEYS.result, result())


def test_a_job_that_has_ended_makes_room(make_agent: Callable[..., JobLoop], store: Store) -> None:
    before = make_agent()._ensure_job()
    end_job(store, before.nonce)
    after = make_agent()._ensure_job()
    assert after.nonce != before.nonce
    assert keys_of(store) == {"spec", "control/desired"}, "nothing of the old job counts for the new one"


def test_agents_that_come_together_after_a_job_agree_on_the_next(
    make_agent: Callable[..., JobLoop], store: Store
) -> None:
    before = make_agent()._ensure_job()
    end_job(store, before.nonce)
    loops = [make_agent() for _ in range(4)]
    together = threading.Barrier(len(loops))

    def ensure(loop: JobLoop) -> str:
        together.wait(DEADLINE_S)
        return loop._ensure_job().nonce

    with ThreadPoolExecutor(len(loops)) as pool:
        [nonce] = set(pool.map(ensure, loops))
    assert nonce != before.nonce
    spec = store.get(KEYS.spec)
    assert spec is not None and pb.JobSpec.FromString(spec.value).nonce == nonce
    assert keys_of(store) == {"spec", "control/desired"}


def test_it_waits_until_the_old_job_s_agents_are_gone(
    make_agent: Callable[..., JobLoop], store: Store
) -> None:
    before = make_agent()._ensure_job()
    end_job(store, before.nonce)
    store.put(KEYS.agent("old"), b"an agent that reads the result")
    loop = make_agent()
    ensured: list[str] = []
    thread = threading.Thread(target=lambda: ensured.append(loop._ensure_job().nonce))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not ensured
    kept = store.get(KEYS.result)
    assert kept is not None, "the old agents have yet to read it"
    store.delete(KEYS.agent("old"))
    thread.join(DEADLINE_S)
    assert ensured and ensured[0] != before.nonce


def test_agents_that_never_go_are_named(
    make_agent: Callable[..., JobLoop], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLLOWERS_LEAVE_S", 0.2)
    store.put(KEYS.result, result())
    store.put(KEYS.agent("old"), b"an agent")
    with pytest.raises(UserError, match=r"job 'job' has ended but 1 agents are still in it.*--rdzv-id"):
        make_agent()._ensure_job()
    assert keys_of(store) == {"control/result", "agents/old"}


def test_another_protocol_is_refused(make_agent: Callable[..., JobLoop], store: Store) -> None:
    store.put(KEYS.spec, pb.JobSpec(protocol=99, nonce="n").SerializeToString())
    with pytest.raises(UserError, match="job 'job' runs protocol 99, this bagua speaks 1"):
        make_agent()._ensure_job()


def test_a_corrupted_job_is_named_with_the_way_out(make_agent: Callable[..., JobLoop], store: Store) -> None:
    store.put(KEYS.spec, b"\xff\xff")
    with pytest.raises(UserError, match=rf"{KEYS.spec} can't be read .*etcdctl del --prefix {KEYS.prefix}"):
        make_agent()._ensure_job()
