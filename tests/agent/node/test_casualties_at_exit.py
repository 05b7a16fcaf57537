"""A casualty at its exit: its record, the messages about it, and the start of its successor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.base.retrying_writes import RETRY_S, DesiredWrites
from bagua_agent.base.timers import Timers
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.history.history_keeper import HistoryKeeper
from bagua_agent.history.job_history import EventKind, JobEvent
from bagua_agent.job_state.change_lines import ChangeLines
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.membership.hang import HangOrder, HangOutcome
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import AgentView, FailureView, JobView
from bagua_agent.node.live_workers import LiveWorkers
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.worker_ends import NodeWorker
from bagua_agent.node.worker_exits import LOOK_AGAIN_S
from bagua_agent.rpc.session_server import SessionServer
from bagua_agent.workers.exits.exit_cause import ExitCause, exit_cause
from bagua_agent.workers.output.log_layout import WorkerFiles
from bagua_agent.workers.process.worker_process import WorkerProcess
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement

KEYS = JobKeys("job")
PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9"
SECONDS_OF_A_WRITE = 10.0


def record(number: int, *members: str) -> Generation:
    """ "b3" is worker 3, of agent b."""
    placements = [
        Placement(m, m[0], f"host-{m[0]}", 0, rank, rank, 0, "", 1, 1, True) for rank, m in enumerate(members)
    ]
    kind = GenerationKind.FAILOVER if number > 1 else GenerationKind.PLANNED
    return Generation(number, number - 1, kind, tuple(placements))


class Node:
    """Agent a with one slot; stands for processes, sessions, store, lease and history alike, and takes notes."""

    def __init__(self, max_restarts: int) -> None:
        self.timers = Timers()
        self.writes = DesiredWrites(self.timers)
        self.said: list[str] = []
        self.stored: list[pb.Failure] = []
        self.events: list[JobEvent] = []
        self.spawned: list[int] = []
        self.now_s = 100.0
        self.store_away = False
        agents = {a: AgentView(a, f"host-{a}", 1, "", False, "", n) for n, a in enumerate("abc")}
        self.seen = LocalJobState(
            pb.JobSpec(max_restarts=max_restarts), JobView(agents=agents, committed_generation=1)
        )
        leased = cast(LeasedKeys, SimpleNamespace(put=lambda key, value: None, remove=lambda key: None))
        history = cast(HistoryKeeper, SimpleNamespace(own=self.events.append))
        store = cast(Store, SimpleNamespace(put=self._put))
        tells = JobTerminal(self.said.append, "host-a")
        lines = ChangeLines(tells, self.timers, "a")
        job = JoinedJob(
            "a", "host-a", KEYS, self.seen, store, leased, self.writes, self.timers, tells, history, lines
        )
        sessions = cast(SessionServer, SimpleNamespace(tell_generation=lambda g: None, forget=lambda w: None))
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        self.way = LiveWorkers(job, cast(NodeWorkers, self), sessions, Policy(), nothing, nothing)
        self.sees(record(1, "a1", "b2", "c3"))

    def _put(self, key: str, value: bytes) -> None:
        if self.store_away:
            raise InfrastructureLost("a test")
        failure = pb.Failure.FromString(value)
        assert key == KEYS.failure(failure.worker_id)
        self.stored.append(failure)

    # of NodeWorkers

    def get(self, worker_id: str) -> object:
        return self if worker_id.startswith("a") else None

    def ended(self, worker_id: str, returncode: int) -> tuple[NodeWorker, ExitCause]:
        process = cast(WorkerProcess, SimpleNamespace(worker_id=worker_id))
        worker = NodeWorker(process, WorkerFiles(Path("/logs") / worker_id), slot=0, was_ready=True)
        return worker, exit_cause(
            returncode, stderr_tail=f"Traceback (most recent call last):\n{self.raised}\n"
        )

    def early_crashes(self, slot: int) -> int:
        return 0

    def spawn(self, slot: int) -> None:
        self.spawned.append(slot)

    # the test's part

    def sees(self, generation: Generation) -> None:
        """In the order of the agent's loop: followers first, timers that are due last."""
        self.way.follow(generation)
        self.seen.view = replace(self.seen.view, generation=generation)
        self.seen.generation = generation
        self.time(0.0)

    def hears_of_a_disagreement(self) -> None:
        order = HangOrder(1, HangOutcome.DISAGREE, ("a1", "b2"), "ranks disagree")
        self.seen.view = replace(self.seen.view, hang_order=order)

    def hears(self, worker: str, summary: str, *, script: bool) -> None:
        failures = self.seen.view.failures
        failure = FailureView(worker, f"host-{worker[0]}", 5, True, script, summary, len(failures) + 1)
        self.seen.view = replace(self.seen.view, failures={**failures, worker: failure})

    def fails(self, raised: str = PEER_LOST) -> None:
        self.raised = raised
        self.way.exited("a1", 1, self.now_s)
        self.time(0.0)

    def time(self, passes_s: float) -> None:
        self.now_s += passes_s
        for due in self.timers.take_due(self.now_s):
            due(self.now_s)
        assert self.writes.flush(SECONDS_OF_A_WRITE)
        for own in self.stored[-1:] if self.seen.whole else ():
            if own.worker_id not in self.seen.view.failures:
                self.hears(own.worker_id, own.cause, script=own.script_failure)

    @property
    def counted(self) -> list[bool]:
        """Of each write of the failure, whether it draws on the budget."""
        return [f.script_failure for f in self.stored]

    @property
    def lines(self) -> list[str]:
        return [line.partition("| ")[2] for line in self.said]


@pytest.fixture
def make_node() -> Iterator[Callable[[int], Node]]:
    made: list[Node] = []

    def make(max_restarts: int) -> Node:
        made.append(Node(max_restarts))
        return made[-1]

    yield make
    for node in made:
        node.writes.stop()


def test_a_cause_that_is_known_already(make_node: Callable[[int], Node]) -> None:
    node = make_node(0)
    node.hears("b2", "killed by SIGKILL", script=False)
    node.fails()
    assert node.counted == [False] and node.spawned == [0]
    of = "global rank 1 on host-b (killed by SIGKILL)"
    assert node.lines == [f"worker in slot 0 ended: {PEER_LOST}; a casualty of {of}; starting another"]
    assert [e.kind for e in node.events] == [EventKind.WORKER_FAILED], "which is what happened to it"
    assert node.timers.next_in_s(node.now_s) == float("inf")


def test_an_exception_raised_from_a_lost_peer(make_node: Callable[[int], Node]) -> None:
    node = make_node(0)
    node.hears("b2", "killed by SIGKILL", script=False)
    node.fails(
        f"{PEER_LOST}\n\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\nStepFailed: 7"
    )
    assert node.stored[0].cause == "StepFailed: 7" and node.counted == [False]


def test_a_cause_that_is_known_later(make_node: Callable[[int], Node]) -> None:
    node = make_node(0)
    node.fails()
    assert node.counted == [True] and node.spawned == []
    assert node.lines == [f"worker in slot 0 failed: {PEER_LOST}"]
    node.time(LOOK_AGAIN_S)
    assert node.spawned == []
    node.hears("b2", "killed by SIGKILL", script=False)
    node.time(LOOK_AGAIN_S)
    assert node.counted == [True, False]
    assert node.lines[1:] == [
        "worker in slot 0 was a casualty of global rank 1 on host-b (killed by SIGKILL): "
        "it does not count as a script failure",
        "worker in slot 0: starting another",
    ]
    node.time(0.0)
    assert node.spawned == [0]
    assert node.timers.next_in_s(node.now_s) == float("inf")


def test_a_host_that_is_gone_is_a_cause_as_soon_as_a_record_says_so(make_node: Callable[[int], Node]) -> None:
    node = make_node(1)
    node.fails()
    assert node.counted == [True] and node.spawned == [0], "the budget allows it"
    node.sees(record(2, "b2", "c3"))
    assert node.counted == [True], "a record without itself tells nothing"
    node.sees(record(3, "c3"))
    assert node.counted == [True, False]
    assert node.lines[-1].startswith("worker in slot 0 was a casualty of global rank 1 on host-b (gone)")
    node.time(0.0)
    assert node.spawned == [0], "once"


def test_a_write_that_is_tried_again_does_not_undo_the_explanation(make_node: Callable[[int], Node]) -> None:
    node = make_node(0)
    node.store_away = True
    node.fails()
    node.store_away = False
    node.hears("b2", "killed by SIGKILL", script=False)
    node.time(LOOK_AGAIN_S)
    node.time(time.monotonic() + RETRY_S)  # retries go by the real clock
    assert node.counted == [False, False], "the retry came last"


def test_what_nothing_explains_counts(make_node: Callable[[int], Node]) -> None:
    node = make_node(1)
    node.fails()
    node.time(Policy().cause_window_s)
    assert node.timers.next_in_s(node.now_s) == float("inf"), "the look is not endless"
    node.hears("b2", "killed by SIGKILL", script=False)
    node.time(1.0)
    assert node.counted == [True] and node.spawned == [0]


def test_an_outage_of_etcd_does_not_use_up_the_time_for_an_explanation(
    make_node: Callable[[int], Node],
) -> None:
    node = make_node(1)
    node.store_away = True
    node.fails()
    for _ in range(20):
        node.time(1.0)
    node.store_away = False
    node.time(time.monotonic() + RETRY_S)  # retries go by the real clock
    node.hears("b2", "killed by SIGKILL", script=False)
    node.time(LOOK_AGAIN_S)
    assert node.counted == [True, False]


def test_in_a_large_job_what_nothing_explains_in_time_counts(make_node: Callable[[int], Node]) -> None:
    """Its agent does not see its own record of the failure, and so not by it that the time has begun."""
    node = make_node(1)
    node.seen.whole = False
    node.fails()
    node.time(Policy().cause_window_s + LOOK_AGAIN_S)
    assert node.timers.next_in_s(node.now_s) == float("inf"), "the look is not endless"
    node.sees(record(2, "a1", "c3"))
    assert node.counted == [True], "a co-worker that leaves hours later explains nothing"


def test_in_a_large_job_an_outage_of_etcd_does_not_use_up_the_time_either(
    make_node: Callable[[int], Node],
) -> None:
    node = make_node(1)
    node.seen.whole = False
    node.store_away = True
    node.fails()
    for _ in range(20):
        node.time(1.0)
    node.store_away = False
    node.time(time.monotonic() + RETRY_S)  # retries go by the real clock
    node.sees(record(2, "a1", "c3"))
    assert node.counted == [True, False]


def test_in_a_large_job_a_commit_of_a_worker_here_is_known(make_node: Callable[[int], Node]) -> None:
    """Its agent does not see members' keys, not even those that it writes."""
    node = make_node(0)
    node.seen.whole, node.seen.view = False, JobView()
    node.way._members["a1"] = pb.Member(worker_id="a1")
    assert not node.seen.has_trained and not node.seen.commit_is_known
    entered = session_pb2.Entered(generation=1, step=1)
    node.way.said("a1", session_pb2.WorkerMessage(entered=entered), node.now_s)
    assert node.seen.has_trained and node.seen.commit_is_known


def test_an_exception_of_its_own_is_no_casualty(make_node: Callable[[int], Node]) -> None:
    node = make_node(0)
    node.hears("b2", "killed by SIGKILL", script=False)
    node.fails("ValueError: bad")
    assert node.counted == [True] and node.spawned == []
    assert node.timers.next_in_s(node.now_s) == float("inf"), "the leader writes the result"


def test_a_failure_of_its_own_waits_for_what_explains_another_nodes(make_node: Callable[[int], Node]) -> None:
    """Two count and one is allowed; then it turns out that the other one does not count."""
    node = make_node(1)
    node.hears("c3", PEER_LOST, script=True)
    node.fails("ValueError: bad")
    assert node.spawned == []
    node.hears("c3", PEER_LOST, script=False)
    node.time(LOOK_AGAIN_S)
    node.time(0.0)
    assert node.spawned == [0] and node.counted == [True]


@pytest.mark.parametrize("change", [{"closing": True}, {"leaving_since_s": 1.0}, {"result": pb.Result()}])
def test_no_look_follows_the_end(make_node: Callable[[int], Node], change: dict[str, object]) -> None:
    node = make_node(0)
    node.fails()
    for name, value in change.items():
        setattr(node.seen, name, value)
    node.hears("b2", "killed by SIGKILL", script=False)
    node.time(LOOK_AGAIN_S)
    assert node.counted == [True] and node.spawned == []
    assert node.timers.next_in_s(node.now_s) == float("inf")


def test_where_ranks_disagree_no_successor_is_started_whatever_the_budget(
    make_node: Callable[[int], Node],
) -> None:
    node = make_node(5)
    node.hears_of_a_disagreement()
    node.fails("MismatchedCollective: ranks disagree")
    node.time(Policy().cause_window_s)
    assert node.spawned == [] and len(node.stored) == 1
    assert node.lines == ["worker in slot 0 failed: MismatchedCollective: ranks disagree"]
