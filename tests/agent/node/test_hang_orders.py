"""A node carries out the leader's hang orders: stacks first, and only workers that are still late are killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.timers import Timers
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership.hang import HangOrder, HangOutcome
from bagua_agent.membership.view import JobView, SuspicionView
from bagua_agent.node.hang_orders import HangOrders
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.workers.stacks import StackTarget
from tests.lab.wait import eventually

DEADLINE_S = 10.0
REPLACE = HangOrder(3, HangOutcome.REPLACE, ("w0", "w1", "elsewhere"), "1 of 3 wait")


@dataclass
class Node:
    """One whose workers are no processes at all; it takes notes."""

    directory: Path
    said: list[str] = field(default_factory=list)
    killed: list[tuple[str, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timers = Timers()
        self.seen = SimpleNamespace(view=JobView(), waits={})
        job = SimpleNamespace(
            timers=self.timers, terminal=JobTerminal(self.said.append, "host"), seen=self.seen
        )
        self.orders = HangOrders(cast(JoinedJob, job), cast(NodeWorkers, self), self.told.append)

    def stack_targets(self) -> list[StackTarget]:
        return [StackTarget(w, 2**30, self.directory, None) for w in ("w0", "w1")]  # no such process

    def kill(self, worker_id: str, why: str) -> None:
        self.killed.append((worker_id, why))

    def stands(self, order: HangOrder | None, *waiting: SuspicionView) -> None:
        self.seen.view = JobView(hang_order=order)
        self.seen.waits = {s.worker_id: s.generation for s in waiting}

    def stacks_saved(self) -> None:
        """Lets the loop do what the saving thread left for it."""
        due = eventually(lambda: self.timers.take_due(time.monotonic()), DEADLINE_S, "stacks are saved", 0.01)
        for act in due:
            act(time.monotonic())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.orders.stop()


def test_to_name_a_worker_saves_stacks_and_kills_none(node: Node) -> None:
    named = HangOrder(3, HangOutcome.NAME, ("w0",), "1 of 3 wait")
    node.stands(named)
    node.orders.take(named)
    node.stacks_saved()
    assert node.killed == []
    assert [line.partition("| ")[2].partition(" in ")[0] for line in node.said] == [
        "1 of 3 wait",
        "stacks of worker w0",
        "stacks of worker w1",
    ]
    assert len(list(node.directory.glob("stacks-*.txt"))) == 2


def test_the_late_are_killed_once_their_stacks_are_saved(node: Node) -> None:
    node.stands(REPLACE, SuspicionView("w1", 2, False, (), 1, 0.0))
    node.orders.take(REPLACE)
    assert node.killed == []
    node.stacks_saved()
    why = "hung: 1 of 3 wait"
    assert node.killed == [("w0", why), ("w1", why), ("elsewhere", why)], "workers of other nodes are not"


def test_who_waits_by_now_is_spared(node: Node) -> None:
    node.stands(REPLACE, SuspicionView("w1", 3, False, (), 1, 0.0))
    node.orders.take(REPLACE)
    node.stacks_saved()
    assert [worker for worker, _ in node.killed] == ["w0", "elsewhere"]


def test_an_order_that_was_taken_back_kills_no_worker(node: Node) -> None:
    node.orders.take(REPLACE)
    node.orders.take(None)
    node.stands(None)
    node.stacks_saved()
    assert node.killed == []


DISAGREE = HangOrder(3, HangOutcome.DISAGREE, ("w0", "elsewhere"), "ranks disagree: rank 0 waits in barrier")


def test_workers_are_told_of_a_disagreement_once_their_stacks_are_saved(node: Node) -> None:
    node.stands(DISAGREE)
    node.orders.take(DISAGREE)
    assert node.told == []
    node.stacks_saved()
    assert node.told == [DISAGREE.reason] and node.killed == []
    assert len(list(node.directory.glob("stacks-*.txt"))) == 2


def test_an_order_that_a_newer_generation_ended_reaches_no_worker(node: Node) -> None:
    node.orders.take(DISAGREE)
    node.orders.take(None)
    node.stands(None)
    node.stacks_saved()
    assert node.told == []
