"""Agents of one torchrun job on a real etcd, each a thread with the plugin's handler, when one of them is lost."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import (
    _TERMINAL_STATE_SYNC_ID,
    SimpleElasticAgent,
    Worker,
    WorkerSpec,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.distributed.elastic.utils.store import barrier

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_torchrun.handler import NO_SHARED_STORE, handler_on
from bagua_torchrun.settings import Settings, parse
from bagua_torchrun.state_backend import HEADER
from bagua_torchrun.watched_handler import WatchedHandler
from tests.lab.wait import HANG_S, eventually

POLL_S = 0.1
ALWAYS = 600  # attempts: a node that lives is not taken for dead, however slow the machine


class Agent:
    """What a torchrun agent does with its handler while its workers run. size: of its round; 0: it has none.

    is_lost_unassigned: it ends once all nodes of its first round have arrived, before its workers have ranks.
    """

    def __init__(
        self, settings: Settings, nodes: str, attempts: int, is_lost_unassigned: bool = False
    ) -> None:
        least, _, most = nodes.partition(":")
        conf = {"keep_alive_interval": 1, "keep_alive_max_attempt": attempts, "last_call_timeout": 1}
        parameters = RendezvousParameters(
            "bagua-etcd", "", "demo", int(least), int(most), "127.0.0.1", **conf
        )
        self.store = Store(settings.store)
        self.handler = handler_on(self.store, settings, parameters)
        self.size, self.rounds, self.was_refused = 0, 0, False
        self.joined: RendezvousInfo | None = None
        self.assigned: list[list[Worker]] = []  # of each round
        self._is_lost_unassigned = is_lost_unassigned
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                self.size = 0
                self.joined = self.handler.next_rendezvous()
                if self._is_lost_unassigned:
                    return self.handler._stop_heartbeats()
                self._assign_ranks(self.joined)
                self.rounds += 1
                self.size = self.joined.world_size
                while not self._ends.wait(POLL_S) and not self.handler.num_nodes_waiting():
                    pass
        except RendezvousClosedError:
            self.was_refused = True

    def _assign_ranks(self, joined: RendezvousInfo) -> None:
        assign = inspect.unwrap(SimpleElasticAgent._assign_worker_ranks)
        spec = WorkerSpec("worker", 2, self.handler, entrypoint="train.py")
        self.assigned.append(assign(None, joined.store, joined.rank, joined.world_size, spec))

    def is_lost(self) -> None:
        """Ends without a word, as when its host is lost."""
        self._ends.set()
        self._thread.join(HANG_S)
        self.handler._stop_heartbeats()

    def finishes(self) -> None:
        """Waits in torchrun's barrier for the others' workers, and is lost there."""
        assert self.joined is not None
        with pytest.raises(DistStoreError):
            barrier(self.joined.store, self.size, _TERMINAL_STATE_SYNC_ID, barrier_timeout=0)
        self.is_lost()

    @property
    def participants(self) -> int:
        return len(self.handler._state_holder.state.participants)


Starts = Callable[..., list[Agent]]


@pytest.fixture
def settings(etcd: EmbeddedEtcd, request: pytest.FixtureRequest) -> Settings:
    return parse(str(etcd.endpoint), request.node.name, {})


@pytest.fixture
def started(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """Starts agents. The first one removes nodes without heartbeats after `attempts` seconds; the others, which are
    lost in these tests, remove no node."""
    agents: list[Agent] = []

    def start(number: int, nodes: str, attempts: int = 2) -> list[Agent]:
        new = [Agent(settings, nodes, ALWAYS if index else attempts) for index in range(number)]
        agents.extend(new)
        return new

    monkeypatch.setenv(NO_SHARED_STORE, "1")
    yield start
    for one in agents:
        one.is_lost()
        one.store.close()


def await_sizes(size: int, *agents: Agent) -> None:
    eventually(lambda: {one.size for one in agents} == {size}, HANG_S, f"one round of {size}")


def test_nodes_that_live_stay_in_their_round(started: Starts) -> None:
    first, second = started(2, "1:2", attempts=ALWAYS)
    await_sizes(2, first, second)
    assert first.handler.num_nodes_waiting() == second.handler.num_nodes_waiting() == 0


def test_the_loss_of_a_node_begins_another_round(started: Starts) -> None:
    survivor, lost = started(2, "1:2")
    await_sizes(2, survivor, lost)
    lost.is_lost()
    await_sizes(1, survivor)


def test_the_loss_of_a_node_that_has_finished_ends_no_worker(started: Starts) -> None:
    """It waits for the other one, whose worker still writes the last checkpoint."""
    writes, finished = started(2, "1:2")
    await_sizes(2, writes, finished)
    finished.finishes()
    eventually(lambda: writes.participants == 1, HANG_S, "it is removed from the round")
    assert writes.handler.num_nodes_waiting() == 0 and writes.rounds == 1


def test_a_node_that_the_others_took_for_dead_joins_again(started: Starts) -> None:
    """The state lacks it, as after an outage of its network, or after etcd has lost its keys."""
    first, second = started(2, "1:2")
    await_sizes(2, first, second)
    before = second.rounds
    second.handler._stop_heartbeats()
    eventually(lambda: second.rounds > before, HANG_S, "it joins again")
    await_sizes(2, first, second)


@pytest.fixture(params=["0", "z"], ids=["rank 0", "last rank"])
def lost(settings: Settings, request: pytest.FixtureRequest) -> _NodeDesc:
    """A node that joined a round and was lost before the round is complete."""
    node = _NodeDesc(request.param, 1, 0)
    state = _RendezvousState()
    state.participants = {node: 0}
    state.last_heartbeats = {node: datetime.now(UTC)}
    with closing(Store(settings.store)) as store:
        store.put(settings.state_key, HEADER + pickle.dumps(state))
    return node


def test_a_node_that_was_lost_before_its_round_was_complete_holds_up_no_other(
    started: Starts, lost: _NodeDesc
) -> None:
    """The first agent completes a round with it, and waits for the master's address or for its arrival."""
    first, second = started(2, "2:2", attempts=3)
    await_sizes(2, first, second)


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_a_node_that_is_lost_before_ranks_are_assigned_costs_the_time_of_its_heartbeats(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, lost_rank: int
) -> None:
    """torch would wait 300 s for its number of workers or, for rank 0, for the ranks, and end the job."""
    monkeypatch.setenv(NO_SHARED_STORE, "1")
    agents = [
        Agent(settings, "2:3", ALWAYS if rank == lost_rank else 3, is_lost_unassigned=rank == lost_rank)
        for rank in (0, 1, 2)
    ]
    survivors = [one for one in agents if one is not agents[lost_rank]]
    try:
        await_sizes(2, *survivors)
        assert agents[lost_rank].joined is not None and agents[lost_rank].joined.rank == lost_rank
        first, last = zip(*((one.assigned[0], one.assigned[-1]) for one in survivors), strict=True)
        of_all = {worker.global_rank for workers in first for worker in workers}
        assert len(of_all) == 4 and not of_all & {2 * lost_rank, 2 * lost_rank + 1}
        assert {worker.world_size for workers in first for worker in workers} == {6}
        assert sorted(worker.global_rank for workers in last for worker in workers) == [0, 1, 2, 3]
    finally:
        for one in agents:
            one.is_lost()
            one.store.close()


@pytest.mark.parametrize("notices", ["one", "all"])
def test_agents_that_notice_a_loss_as_their_round_is_complete_form_one_other_round(
    started: Starts, lost: _NodeDesc, notices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's heartbeat ends between the completion and an agent's next reading of the state."""
    get_world = WatchedHandler._get_world
    late: list[WatchedHandler] = []

    def get_world_late(handler: WatchedHandler) -> tuple[int, int]:
        late.append(handler)
        if notices == "all" or handler is late[0]:
            handler._state_holder.state.participants.pop(lost, None)
        return get_world(handler)

    monkeypatch.setattr(WatchedHandler, "_get_world", get_world_late)
    first, second = started(2, "2:3", attempts=3)
    await_sizes(2, first, second)
    assert first.rounds == second.rounds, "no agent left alone with ranks of the first round"


def test_agents_whose_etcd_has_lost_its_keys_stay_one_run(started: Starts, settings: Settings) -> None:
    first, second = started(2, "1:3")
    await_sizes(2, first, second)
    with closing(Store(settings.store)) as store:
        store.delete_prefix(settings.prefix)
    (third,) = started(1, "1:3")
    await_sizes(3, first, second, third)


def test_a_closed_run_has_no_other_round(started: Starts) -> None:
    first, second = started(2, "1:2")
    await_sizes(2, first, second)
    second.handler.shutdown()
    second.is_lost()
    eventually(lambda: first.participants == 1, HANG_S, "it is removed from the round")
    assert first.handler.num_nodes_waiting() == 0 and not first.was_refused
