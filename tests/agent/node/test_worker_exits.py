"""The reaction to a worker's end: every case, and the order of the writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.errors import BaguaError, InfrastructureLost, UserError
from bagua_agent.base.retrying_writes import DesiredWrites
from bagua_agent.base.timers import Timers
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.history.history_keeper import HistoryKeeper
from bagua_agent.job_state.change_lines import ChangeLines
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import FailureView, JobView
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.own_key import OwnKey
from bagua_agent.node.worker_ends import NodeWorker
from bagua_agent.node.worker_exits import (
    LOOK_AGAIN_S,
    Consequence,
    LastSeen,
    Record,
    WorkerExits,
    consequence,
)
from bagua_agent.workers.exits.exit_cause import ExitCause, exit_cause
from bagua_agent.workers.output.log_layout import WorkerFiles
from bagua_agent.workers.process.worker_process import WorkerProcess
from bagua_contract import membership_pb2 as pb

DEADLINE_S = 10.0
STDERR = "Traceback (most recent call last):\nValueError: no such device\n"

MEMBER, NO_MEMBER = LastSeen(True, False), LastSeen(False, False)
TRAINED = LastSeen(True, True)


@pytest.mark.parametrize("last", [MEMBER, NO_MEMBER, TRAINED])
def test_an_end_with_0_is_recorded(last: LastSeen) -> None:
    expected = Consequence(Record.FINISHED)
    assert consequence(0, False, last, leaving=False, stopping=False) == expected
    assert consequence(0, False, last, leaving=False, stopping=True) == expected


def test_leaving_with_0_says_nothing_about_the_end_of_the_job() -> None:
    assert consequence(0, False, MEMBER, leaving=True, stopping=True) == Consequence(Record.DEPARTED)
    assert consequence(0, False, TRAINED, leaving=True, stopping=True) == Consequence(Record.FINISHED)


@pytest.mark.parametrize(("returncode", "leaving"), list(product([1, -9, -15], [False, True])))
def test_an_expected_end_is_no_failure(returncode: int, leaving: bool) -> None:
    record = Record.DEPARTED if leaving else Record.NONE
    assert consequence(returncode, True, MEMBER, leaving=leaving, stopping=True) == Consequence(record)


def test_a_lost_members_key_goes_at_once() -> None:
    found = consequence(-9, False, MEMBER, leaving=False, stopping=False)
    assert found == Consequence(Record.FAILURE, at_once=True, unexpected=True)


@pytest.mark.parametrize(("script_failure", "last"), [(True, MEMBER), (True, NO_MEMBER), (False, NO_MEMBER)])
def test_a_failure_is_known_before_its_key_is_gone(script_failure: bool, last: LastSeen) -> None:
    found = consequence(1, script_failure, last, leaving=False, stopping=False)
    assert found == Consequence(Record.FAILURE, at_once=False, unexpected=True)


# -- what follows a failure in its slot


class Node:
    """An agent with two slots that stands for processes, store, lease and history alike, and takes notes."""

    def __init__(self, *, trained: bool = True, max_restarts: int = 0, crashes_allowed: int = 5) -> None:
        self.policy = Policy(crashes_before_quarantine=crashes_allowed)
        self.timers = Timers()
        self.writes = DesiredWrites(self.timers)
        self.said: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.own: list[pb.Agent] = []  # what stood in this agent's key, in order
        self.events: list[object] = []
        self.crashes = 0
        self.spawned: list[int] = []
        self.worker_ids: list[str] = ["w0"]
        self.not_spawned: list[BaguaError] = []  # what the next attempts meet
        self.seen = LocalJobState(
            pb.JobSpec(max_restarts=max_restarts), JobView(committed_generation=1 if trained else 0)
        )
        keys = JobKeys("job")
        leased = cast(LeasedKeys, SimpleNamespace(put=self._put_leased, remove=lambda key: None))
        history = cast(HistoryKeeper, SimpleNamespace(own=self.events.append))
        store = cast(Store, SimpleNamespace(put=self.stored.__setitem__))
        tells = JobTerminal(self.said.append, "host")
        self.keys = keys
        lines = ChangeLines(tells, self.timers, "a")
        job = JoinedJob(
            "a", "host", keys, self.seen, store, leased, self.writes, self.timers, tells, history, lines
        )
        own_key = OwnKey(leased, keys, agent_id="a", node_name="host", control_address="host:1", slots=2)
        self.exits = WorkerExits(job, cast(NodeWorkers, self), self.policy, own_key.one_slot_less)

    def _put_leased(self, key: str, value: bytes) -> None:
        assert key == self.keys.agent("a")
        self.own.append(pb.Agent.FromString(value))

    # of NodeWorkers

    def ended(self, worker_id: str, returncode: int) -> tuple[NodeWorker, ExitCause]:
        self.crashes += 1
        process = cast(WorkerProcess, SimpleNamespace(worker_id=worker_id))
        worker = NodeWorker(process, WorkerFiles(Path("/logs") / worker_id), slot=1)
        return worker, exit_cause(returncode, stderr_tail=STDERR)

    def early_crashes(self, slot: int) -> int:
        assert slot == 1
        return self.crashes

    def spawn(self, slot: int) -> None:
        if self.not_spawned:
            raise self.not_spawned.pop(0)
        self.spawned.append(slot)

    # the test's part

    def crash(self, now_s: float = 100.0, last: LastSeen = NO_MEMBER) -> float | None:
        """A worker of slot 1 ends before its first step. In how many seconds another is started; None: never."""
        self.exits.take(f"w{self.crashes}", 1, last, now_s)
        assert self.writes.flush(DEADLINE_S)
        return None if (due_s := self.timers.next_in_s(now_s)) == float("inf") else due_s

    def time(self, now_s: float) -> None:
        for due in self.timers.take_due(now_s):
            due(now_s)

    @property
    def lines(self) -> list[str]:
        return [line.partition("| ")[2] for line in self.said]


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    """Takes Node's keywords."""
    made: list[Node] = []

    def make(**keywords: object) -> Node:
        made.append(Node(**keywords))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for node in made:
        node.writes.stop()


def test_a_slot_gets_another_worker_at_once_and_then_ever_later(make_node: Callable[..., Node]) -> None:
    node = make_node()
    assert [node.crash() for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]
    assert node.lines[:2] == [
        "worker in slot 1 ended: ValueError: no such device; starting another",
        "worker in slot 1 ended: ValueError: no such device; starting another in 0.5 s",
    ]
    node.time(101.9)
    assert node.spawned == []
    node.time(102.0)
    assert node.spawned == [1]
    assert node.own == [], "the node still has all its slots"


def test_a_slot_whose_workers_never_start_well_is_given_up_and_the_node_says_so(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(crashes_allowed=2)
    assert node.crash() == 0.0
    node.time(100.0)
    assert node.spawned == [1]
    assert node.crash(101.0) is None
    node.time(1e6)
    assert node.spawned == [1], "no third one"
    assert [agent.slots for agent in node.own] == [1], "the leader must not wait for a worker in that slot"
    assert node.lines[-1].startswith(
        "worker in slot 1 is given up: 2 workers in a row ended before their first step, the last with: ValueError"
    )
    failures = [pb.Failure.FromString(node.stored[node.keys.failure(f"w{i}")]) for i in range(2)]
    assert [f.slot for f in failures] == [1, 1], "both are on record"
    assert len(node.events) == 2
    assert node.exits.exit_code == 1


def test_a_joiners_failure_says_that_it_had_no_share_of_the_step(make_node: Callable[..., Node]) -> None:
    node = make_node(max_restarts=1)
    node.crash(last=LastSeen(True, False, generation=3, steps=7, joining=True))
    record = pb.Failure.FromString(node.stored[node.keys.failure("w0")])
    assert (record.in_step, record.step, record.joining) == (True, 7, True)


@pytest.mark.parametrize("closing", [False, True])
def test_a_failure_that_ends_the_job_gives_up_no_slot(make_node: Callable[..., Node], closing: bool) -> None:
    """The leader writes the result; what the job waits for until then is not this node's to change."""
    node = make_node(trained=closing, crashes_allowed=1)
    node.seen.closing = closing
    assert node.crash() is None
    assert node.own == []
    assert node.lines == ["worker in slot 1 failed: ValueError: no such device"]


@pytest.mark.parametrize(("here", "due_s"), [(True, 0.0), (False, Policy().cause_window_s)])
def test_in_a_large_job_that_has_trained_a_crash_before_joining_gets_a_successor(
    make_node: Callable[..., Node], here: bool, due_s: float
) -> None:
    """The record is of base 0, and others' commits are not seen. here: a worker of this node has committed."""
    node = make_node(trained=False)
    node.seen.whole, node.seen.committed_here = False, here
    node.crash(100.0)
    for tenths in range(round(due_s * 10)):
        node.time(100.0 + tenths / 10)
    assert node.spawned == []
    for _ in range(2):  # the look, and the start
        node.time(100.0 + due_s + LOOK_AGAIN_S)
    assert node.spawned == [1]
    assert node.timers.next_in_s(0.0) == float("inf")


@pytest.mark.parametrize(
    ("last", "closing", "successor"),
    [
        (LastSeen(True, False, left_out=True), False, True),
        (LastSeen(True, False, left_out=True), True, False),
        (LastSeen(True, True, left_out=True), False, False),
        (LastSeen(True, False), False, False),
    ],
)
def test_the_slot_of_a_worker_that_was_left_out_and_ended_with_0_gets_another(
    make_node: Callable[..., Node], last: LastSeen, closing: bool, successor: bool
) -> None:
    """Its script ended by a value that the others did not have."""
    node = make_node()
    node.seen.closing = closing
    node.exits.take("w0", 0, last, 100.0)
    assert node.writes.flush(DEADLINE_S)
    assert (node.keys.departed("w0") in node.stored) == successor
    assert (node.keys.finished("w0") in node.stored) != successor
    node.time(100.0)
    assert node.spawned == ([1] if successor else [])


def test_in_a_large_job_that_fails_no_successor_follows(make_node: Callable[..., Node]) -> None:
    node = make_node(trained=False)
    node.seen.whole = False
    assert node.crash(100.0) == pytest.approx(LOOK_AGAIN_S)
    assert node.lines == ["worker in slot 1 failed: ValueError: no such device"]
    node.seen.result = pb.Result()
    node.time(100.0 + 2 * Policy().cause_window_s)
    assert node.spawned == [] and node.timers.next_in_s(0.0) == float("inf")


@pytest.mark.parametrize("change", [{"leaving_since_s": 100.2}, {"closing": True}, {"result": pb.Result()}])
def test_no_worker_is_started_for_a_job_that_ends_meanwhile(
    make_node: Callable[..., Node], change: dict[str, object]
) -> None:
    node = make_node()
    node.crash()
    assert node.crash() == 0.5
    for name, value in change.items():
        setattr(node.seen, name, value)
    node.time(101.0)
    assert node.spawned == []


@pytest.mark.parametrize(("known", "follows_s"), [("w0", 0.0), ("of another node", None)])
def test_a_failure_that_the_store_shows_already_counts_once(
    make_node: Callable[..., Node], known: str, follows_s: float | None
) -> None:
    node = make_node(trained=False, max_restarts=1)
    failure = FailureView(known, "host", 0, False, True, "ValueError: no such device", 1)
    node.seen.view = JobView(failures={known: failure})
    assert node.crash() == follows_s


@pytest.mark.parametrize("error", [InfrastructureLost("no space left"), UserError("no script")], ids=repr)
def test_a_worker_that_cannot_be_started_is_tried_again_while_the_others_go_on(
    make_node: Callable[..., Node], error: BaguaError
) -> None:
    node = make_node()
    node.not_spawned = [error] * 3
    node.crash()
    for at_s in (100.0, 100.5, 101.5):
        node.time(at_s)
    assert node.spawned == [] and node.not_spawned == [], "three attempts failed"
    assert node.lines[-1] == f"no worker could be started in slot 1: {error}; trying again in 2 s"
    node.time(103.4)
    assert node.spawned == []
    node.time(103.5)
    assert node.spawned == [1]
    assert node.own == [], "the node still has all its slots"


def test_what_the_user_must_mend_ends_a_node_without_workers(make_node: Callable[..., Node]) -> None:
    node = make_node()
    node.worker_ids = []
    node.not_spawned = [InfrastructureLost("no space left"), UserError("no script")]
    node.crash()
    node.time(100.0)
    with pytest.raises(UserError):
        node.time(100.5)


def test_a_slot_whose_workers_end_without_end_is_written_slowly(make_node: Callable[..., Node]) -> None:
    """They report a step and kill themselves, which counts on no budget of failures."""
    node = make_node()
    now_s, ends = 0.0, 0
    while now_s < 1000.0:
        node.crashes = 0
        node.exits.take("w0", -9, MEMBER, now_s)
        now_s += 0.1 + node.timers.next_in_s(now_s)
        node.time(now_s)
        ends += 1
    assert len(node.spawned) == ends
    assert 1000 < ends < 1300, "some hundred at once, then one a second"
