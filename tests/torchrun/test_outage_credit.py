"""torch's own state machine over outages of etcd, on a clock of the test: who is alive afterwards."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, cast

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as of_torch

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import Compare, KeyValue
from bagua_torchrun.outage_credit import Outage, OutageCredit, credited
from bagua_torchrun.run_lease import LeasedKeys
from bagua_torchrun.state_backend import HEADER, StateBackend

INTERVAL_S, ATTEMPTS = 2.0, 3
DEAD_AFTER_S = INTERVAL_S * ATTEMPTS
POLL_S = 0.5  # torchrun asks so often whether nodes wait
ANSWER_S = 0.01
OUTAGE_BEGAN_S = 21.1
START = datetime(2026, 1, 1, tzinfo=UTC)


class Etcd:
    """One key. Its agents' clocks go on to the end of an outage if they ask within it, or by `limit_s`."""

    def __init__(self, outage_s: float, limit_s: float = 60.0) -> None:
        self.back_s = OUTAGE_BEGAN_S + outage_s
        self.limit_s = limit_s
        self.value, self.revision = b"", 1

    def serve(self, agent: Agent) -> None:
        if OUTAGE_BEGAN_S <= agent.clock_s < self.back_s:
            if self.back_s - agent.clock_s > self.limit_s:
                agent.clock_s += self.limit_s
                raise StoreUnavailable("away, as the test wants")
            agent.clock_s = self.back_s
        agent.clock_s += ANSWER_S


class Keys:
    """What the backend of one agent uses of etcd."""

    def __init__(self, etcd: Etcd, agent: Agent) -> None:
        self._etcd, self._agent = etcd, agent
        self.store = self

    def get(self, key: str) -> KeyValue:
        self._etcd.serve(self._agent)
        return KeyValue(key, self._etcd.value, 1, self._etcd.revision)

    def put_if(self, compare: Compare, key: str, value: bytes) -> bool:
        self._etcd.serve(self._agent)
        if compare.expected != self._etcd.revision:
            return False
        self._etcd.value, self._etcd.revision = value, self._etcd.revision + 1
        return True


class Agent:
    """torch's holder and executor of one node, on a clock of its own."""

    running: Agent  # the one whose clock torch reads

    def __init__(self, name: str, etcd: Etcd, clock_s: float = 0.0, ahead_s: float = 0.0) -> None:
        self.clock_s, self.ahead_s = clock_s, ahead_s
        self.beats_s = clock_s + INTERVAL_S
        self.dies_s = float("inf")
        self.node = of_torch._NodeDesc(name, 1, 0)
        settings = of_torch.RendezvousSettings(
            "demo", 1, 3, of_torch.RendezvousTimeout(), timedelta(seconds=INTERVAL_S), ATTEMPTS
        )
        credit = OutageCredit(INTERVAL_S, DEAD_AFTER_S, lambda: self.clock_s, self.utc)
        backend = StateBackend(cast(LeasedKeys, Keys(etcd, self)), "/state", credit)
        self.holder = of_torch._BackendRendezvousStateHolder(backend, settings, cache_duration=0)
        self.executor = of_torch._DistributedRendezvousOpExecutor(self.node, self.holder, settings)

    def utc(self) -> datetime:
        return START + timedelta(seconds=self.clock_s + self.ahead_s)

    def poll(self) -> None:
        """What a torchrun agent does beside its workers: it looks at the state, and sends a heartbeat."""
        Agent.running = self
        try:
            self.holder.sync()
            if self.clock_s >= self.beats_s:
                self.beats_s = self.clock_s + INTERVAL_S
                self.executor.run(of_torch._RendezvousKeepAliveOp(), time.monotonic() + 60)
        except RendezvousConnectionError:
            pass  # torchrun logs a heartbeat that failed
        self.clock_s += POLL_S

    def wait_for_a_round(self) -> None:
        """What an agent without a place does: it enters the wait list, again if others wrote in between."""
        Agent.running = self
        self.holder.sync()
        while self.node not in self.holder.state.wait_list:
            self.executor._state = self.holder.state
            self.executor._add_to_wait_list()
            self.holder.mark_dirty()
            self.holder.sync()

    @property
    def sees(self) -> set[str]:
        return {node.addr for node in self.holder.state.participants}


@pytest.fixture(autouse=True)
def agents_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return Agent.running.utc()

    monkeypatch.setattr(of_torch, "datetime", Clock)
    for kind in (of_torch._BackendRendezvousStateHolder, of_torch._DistributedRendezvousOpExecutor):
        monkeypatch.setattr(kind, "_record", lambda self, **words: None)  # dear: it looks at the stack
    yield


def in_a_round(etcd: Etcd, *agents: Agent) -> None:
    """The agents' workers run."""
    state = of_torch._RendezvousState()
    state.complete = True
    state.participants = {agent.node: rank for rank, agent in enumerate(agents)}
    state.last_heartbeats = {agent.node: agent.utc() for agent in agents}
    etcd.value = HEADER + pickle.dumps(state)


def run_until(until_s: float, *agents: Agent) -> None:
    """Their polls in the order of time."""
    while (next_ := min(agents, key=lambda agent: agent.clock_s)).clock_s < until_s:
        if next_.clock_s >= next_.dies_s:
            next_.clock_s = float("inf")
        else:
            next_.poll()


@pytest.mark.parametrize("ahead_s", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("outage_s", [1.0, 3.5, 4.5, 8.0, 59.0])
def test_all_nodes_outlast_an_outage(outage_s: float, ahead_s: float) -> None:
    etcd = Etcd(outage_s)
    first, second = Agent("first", etcd), Agent("second", etcd, 0.9, ahead_s)
    in_a_round(etcd, first, second)
    run_until(etcd.back_s + 30.0, first, second)
    assert first.sees == second.sees == {"first", "second"}
    assert first.node in first.holder.state.last_heartbeats


def test_nodes_outlast_an_outage_that_is_longer_than_a_requests_limit() -> None:
    etcd = Etcd(20.0, limit_s=7.0)
    first, second = Agent("first", etcd), Agent("second", etcd, 0.9)
    in_a_round(etcd, first, second)
    run_until(etcd.back_s + 30.0, first, second)
    assert first.sees == second.sees == {"first", "second"}


@pytest.mark.parametrize("outage_s", [0.0, 8.0])
@pytest.mark.parametrize("before_s", [5.0, 1.0, -1.0])
def test_a_node_that_dies_about_an_outage_expires_after_it(before_s: float, outage_s: float) -> None:
    etcd = Etcd(outage_s)
    first, second = Agent("first", etcd), Agent("second", etcd, 0.9)
    in_a_round(etcd, first, second)
    second.dies_s = OUTAGE_BEGAN_S - before_s
    run_until(etcd.back_s + DEAD_AFTER_S + 2 * POLL_S, first, second)
    assert first.sees == {"first"}
    run_until(etcd.back_s + 30.0, first)
    assert first.sees == {"first"}


@pytest.mark.parametrize("late_s", [0.02, 0.5, 2.0, 10.0])
def test_a_node_that_comes_after_an_outage_joins_the_others(late_s: float) -> None:
    etcd = Etcd(8.0)
    first, second = Agent("first", etcd), Agent("second", etcd, 0.9)
    in_a_round(etcd, first, second)
    third = Agent("third", etcd, etcd.back_s + late_s)
    run_until(third.clock_s, first, second)
    third.wait_for_a_round()
    assert third.sees == {"first", "second"}
    run_until(etcd.back_s + 30.0, first, second, third)
    for agent in (first, second, third):
        assert agent.sees == {"first", "second"}
        assert {node.addr for node in agent.holder.state.wait_list} == {"third"}


def test_a_run_whose_agents_are_all_dead_is_begun_anew() -> None:
    etcd = Etcd(0.0)
    first = Agent("first", etcd)
    in_a_round(etcd, first)
    later = Agent("later", etcd, 600.0)
    run_until(600.0 + DEAD_AFTER_S - POLL_S, later)
    assert later.sees == {"first"}
    run_until(600.0 + DEAD_AFTER_S + 2 * POLL_S, later)
    assert later.sees == set() and later.holder.state.round == 1


@pytest.mark.parametrize("zone", [UTC, None])
def test_an_outage_is_added_once(zone: timezone | None) -> None:
    outages = (
        Outage(START, timedelta(seconds=8)),
        Outage(START + timedelta(seconds=20), timedelta(seconds=10)),
    )
    begin = START.replace(tzinfo=zone)

    def at(seconds: float) -> datetime:
        return begin + timedelta(seconds=seconds)

    assert credited(at(-9), outages[:1]) == at(-1)
    assert credited(at(-5), outages[:1]) == credited(at(-1), outages[:1]) == at(0)
    assert credited(at(1), outages[:1]) == at(1)
    assert credited(at(-9), outages) == at(9)
    assert credited(at(12), outages) == at(20)
