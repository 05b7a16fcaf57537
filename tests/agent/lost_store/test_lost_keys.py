"""An agent notices that the store lost the job's keys, has them put again, and stands for election only later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from bagua_agent.base.errors import JobReplaced
from bagua_agent.base.timers import Timers
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Store, Transaction
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.history.history_keeper import HistoryKeeper
from bagua_agent.job_state.change_lines import ChangeLines
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.lost_store.lost_keys import LOOK_AGAIN_S, LostKeys
from bagua_agent.lost_store.recreation import SETTLE_S
from bagua_agent.membership.view import JobView
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind

KEYS = JobKeys("job")
SPEC = pb.JobSpec(nonce="ours")
NOW_S = 100.0


@dataclass
class Agent:
    """Its parts but the store: writes are counted, not made."""

    said: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    found: dict[str, KeyValue] = field(default_factory=dict)
    reading: bool = False

    def __post_init__(self) -> None:
        self.seen = LocalJobState(SPEC, JobView(), Generation(3, 2, GenerationKind.FAILOVER, (), "ours"))
        self.seen.remember(KEYS.spec, SPEC.SerializeToString())
        self.timers = Timers()
        history = HistoryKeeper(KEYS, "host", self, lambda: 1e9)
        history.leader_is("a", leading=True)
        writes = SimpleNamespace(until_done=self.until_done)
        tells = JobTerminal(self.said.append, "host")
        self.job = JoinedJob(
            "a",
            "host",
            KEYS,
            self.seen,
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            writes,  # type: ignore[arg-type]
            self.timers,
            tells,
            history,
            ChangeLines(tells, self.timers, "a"),
        )
        self.lost_keys = LostKeys(self.job, lambda: None if self.reading else self.found)

    def submit(self, store: Store, nonce: str) -> None:
        """From here on it is an agent of a submitted job, and its writes are made, at once."""
        writes = SimpleNamespace(until_done=lambda what, write: write())
        job = replace(self.job, store=store, writes=writes)  # type: ignore[arg-type]
        self.lost_keys = LostKeys(job, lambda: self.found, submission=nonce)

    def until_done(self, what: str, write: Callable[[], object]) -> None:
        self.written.append(what)

    def write(self, key: str, value: bytes) -> None:
        self.events.append(key.removeprefix(KEYS.events))

    def remove(self, keys: list[str]) -> None: ...

    def flush(self, timeout_s: float) -> bool:
        return True

    def take(self, *changes: Change, now_s: float = NOW_S) -> None:
        self.lost_keys.notice(changes, now_s)
        self.lost_keys.mend(changes, now_s)

    def stands(self, key: str, value: bytes) -> None:
        self.found[key] = KeyValue(key, value, 5, 5, 1, 0)


def removed(key: str) -> Change:
    return Change(key, None, 9, 5)


def test_lost_keys_are_put_again_and_the_others_given_time() -> None:
    agent = Agent()
    assert agent.lost_keys.settling_for_s(NOW_S) == 0
    agent.take(removed(KEYS.spec), removed(KEYS.generation))
    assert agent.written == ["lost keys"] and agent.events == ["keys-lost-a-1"]
    assert agent.lost_keys.settling_for_s(NOW_S) == SETTLE_S
    assert agent.lost_keys.settling_for_s(NOW_S + SETTLE_S) == 0


def test_it_looks_again_until_they_stand() -> None:
    agent = Agent()
    agent.take(removed(KEYS.spec))
    for due in agent.timers.take_due(NOW_S + LOOK_AGAIN_S):
        due(NOW_S + LOOK_AGAIN_S)
    assert agent.written == ["lost keys"] * 2
    assert agent.seen.generation is not None
    agent.stands(KEYS.spec, SPEC.SerializeToString())
    agent.stands(KEYS.generation, agent.seen.generation.encode())
    for due in agent.timers.take_due(NOW_S + 2 * LOOK_AGAIN_S):
        due(NOW_S + 2 * LOOK_AGAIN_S)
    assert agent.written == ["lost keys"] * 2
    assert agent.timers.next_in_s(NOW_S) == float("inf")


def test_a_record_that_is_still_being_read_is_not_lost() -> None:
    agent = Agent()
    agent.reading = True
    agent.take(removed(KEYS.spec))
    assert agent.written == []
    agent.reading = False
    agent.take(removed(KEYS.spec))
    assert agent.written == ["lost keys"]


def test_one_loss_is_told_once() -> None:
    agent = Agent()
    agent.take(removed(KEYS.spec))
    agent.take(removed(KEYS.generation), now_s=NOW_S + 0.1)
    assert len(agent.said) == len(agent.events) == 1


def test_a_later_loss_is_told_again() -> None:
    agent = Agent()
    for now_s in (NOW_S, NOW_S + SETTLE_S + 1.0):
        agent.take(removed(KEYS.spec), now_s=now_s)
    assert agent.said[0][-40:] == agent.said[1][-40:] and len(agent.said) == len(agent.events) == 2


def test_an_agent_whose_own_key_is_lost_gives_the_others_time_too() -> None:
    """Another agent may have put the job's keys again before this one reads the store."""
    by_reading, by_lease = Agent(), Agent()
    by_reading.take(removed(KEYS.agent("a")))
    by_lease.lost_keys.own_keys_lost(NOW_S)
    for agent in (by_reading, by_lease):
        assert agent.lost_keys.settling_for_s(NOW_S) == SETTLE_S
        assert agent.said == agent.written == []
    by_lease.take(removed(KEYS.spec), now_s=NOW_S + 0.1)
    assert len(by_lease.said) == 1, "a loss of the job's keys that is seen later has its line"


def test_other_keys_are_not_its_affair() -> None:
    agent = Agent()
    agent.take(removed(KEYS.agent("b")), removed(KEYS.leader), removed(KEYS.suspicion("w")))
    assert agent.written == agent.said == [] and agent.lost_keys.settling_for_s(NOW_S) == 0


def test_a_job_that_has_ended_may_make_room() -> None:
    agent = Agent()
    agent.seen.result = pb.Result(outcome=pb.Result.SUCCEEDED)
    agent.stands(KEYS.spec, pb.JobSpec(nonce="next").SerializeToString())
    agent.seen.remember(KEYS.result, agent.seen.result.SerializeToString())
    agent.take(removed(KEYS.result), removed(KEYS.generation))
    assert agent.written == agent.said == []


def test_an_agent_that_has_trained_nothing_comes_again() -> None:
    agent = Agent()
    agent.stands(KEYS.spec, pb.JobSpec(nonce="older").SerializeToString())
    with pytest.raises(JobReplaced):
        agent.take(Change(KEYS.spec, agent.found[KEYS.spec].value, 5, 5))


def test_an_agent_whose_worker_has_committed_does_not_give_way_though_it_sees_no_members() -> None:
    """As in a large job. The other job, which was begun meanwhile, has trained nothing."""
    agent = Agent()
    agent.seen.committed_here = True
    agent.stands(KEYS.spec, pb.JobSpec(nonce="later").SerializeToString())
    agent.take(Change(KEYS.spec, agent.found[KEYS.spec].value, 5, 5))
    assert agent.written == ["lost keys"]


# -- a job that was submitted to a cluster, and removed


@pytest.fixture
def store() -> Iterator[Store]:
    etcd = EmbeddedEtcd.start()
    made = Store(StoreConfig((parse_endpoint(etcd.endpoint),)))
    yield made
    made.close()
    etcd.stop()


def submitted_agent(store: Store) -> Agent:
    """Its writes are made at once."""
    agent = Agent()
    agent.submit(store, "n1")
    return agent


def test_keys_of_a_submitted_job_are_put_again(store: Store) -> None:
    agent = submitted_agent(store)
    agent.take(removed(KEYS.spec))
    assert store.get(KEYS.spec) is not None and store.get(KEYS.generation) is not None


def test_nothing_of_a_removed_job_is_put_again(store: Store) -> None:
    agent = submitted_agent(store)
    store.put(cluster_keys.removal("n1"), b"")
    agent.take(removed(KEYS.spec))
    assert store.get_prefix(KEYS.prefix)[0] == [] and store.get_prefix(KEYS.records)[0] == []
    with pytest.raises(JobReplaced, match="the job was removed"):
        for due in agent.timers.take_due(NOW_S + LOOK_AGAIN_S):
            due(NOW_S + LOOK_AGAIN_S)


def test_a_removal_that_comes_while_keys_are_put_again_wins(store: Store) -> None:
    """Between the look at the removal and the transaction."""
    agent = submitted_agent(store)

    class Late(Store):
        def transact(self, *arguments: Any, **more: Any) -> Transaction:
            store.put(cluster_keys.removal("n1"), b"")
            return super().transact(*arguments, **more)

    late = Late(store.config)
    agent.submit(late, "n1")
    agent.take(removed(KEYS.spec))
    late.close()
    assert store.get(KEYS.spec) is None and store.get(KEYS.generation) is None
