"""Restart mode, one node: a worker that fails makes its agent ask for the leader, until a newer record comes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.timers import Timers
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.own_key import OwnKey
from bagua_agent.node.restarted_workers import RestartedWorkers
from bagua_agent.node.worker_lifecycle import LEADER_AGAIN_S
from bagua_agent.rpc.session_server import SessionServer
from bagua_agent.workers.exits.exit_cause import ExitCause
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement

OWN, OTHER = "a", "b"


def record(number: int, *agents: str) -> Generation:
    members = tuple(
        Placement(
            worker_id=f"{agent}.0.g{number}",
            agent_id=agent,
            node_name=f"host-{agent}",
            slot=0,
            global_rank=rank,
            local_rank=0,
            node_rank=rank,
            store_address="",
            since_generation=1,
            join_revision=rank + 1,
            holder=False,
        )
        for rank, agent in enumerate(agents)
    )
    return Generation(number, 0, GenerationKind.RESTART, members, "nonce")


class Node:
    """Stands for store, sessions and processes alike. asked: when it asked for the leader. stored: by key. ends: the
    signals that asked all workers to end. kills: how often all were killed."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.asked: list[float] = []
        self.running: list[str] = []
        self.ends: list[int] = []
        self.kills = 0
        self.stored: dict[str, bytes] = {}
        self.seen = SimpleNamespace(stopping=False, failures_allowed=0, leaving_signal=0)
        job = SimpleNamespace(
            agent_id=OWN,
            node_name="host-a",
            keys=JobKeys("job"),
            seen=self.seen,
            timers=self.timers,
            store=SimpleNamespace(put=self.stored.__setitem__),
            writes=SimpleNamespace(until_done=lambda what, write: write()),
            terminal=SimpleNamespace(tell=lambda text: None),
        )
        self.way = RestartedWorkers(
            cast(JoinedJob, job),
            cast(NodeWorkers, self),
            cast(SessionServer, SimpleNamespace(forget=lambda worker_id: None)),
            cast(OwnKey, SimpleNamespace(runs=lambda generation, run: None)),
            on_session=lambda: None,
            on_suspicion=self.asked.append,
            shutdown_timeout_s=1.0,
        )
        self.runs(record(1, OTHER, OWN))

    @property
    def worker_ids(self) -> list[str]:
        return self.running

    def get(self, worker_id: str) -> object:
        return worker_id if worker_id in self.running else None

    def spawn(self, slot: int, started_for: object) -> None:
        self.running.append(started_for.worker_id)  # type: ignore[attr-defined]

    def ended(self, worker_id: str, returncode: int) -> tuple[object, ExitCause]:
        self.running.remove(worker_id)
        files = SimpleNamespace(directory=Path("logs"), shown="logs")
        return SimpleNamespace(slot=0, files=files, kills_in_a_row=0), ExitCause(
            returncode, None, "it failed", "", True
        )

    def ask_all_to_end(self, number: int) -> None:
        self.ends.append(number)

    def signal_all(self, number: int) -> None:
        assert number == signal.SIGKILL
        self.kills += 1

    def open_meeting(self) -> str:
        return "10.0.0.1:1"

    def runs(self, generation: Generation) -> None:
        self.way.follow(generation)
        self.way.met(generation.number, "10.0.0.2:1")

    def exits(self, returncode: int, now_s: float) -> None:
        self.way.exited(self.running[0], returncode, now_s)

    def finished(self) -> list[pb.Finished]:
        folder = JobKeys("job").finished_workers
        return [pb.Finished.FromString(value) for key, value in self.stored.items() if key.startswith(folder)]

    def time(self, now_s: float) -> None:
        for due in self.timers.take_due(now_s):
            due(now_s)


def test_a_failed_worker_makes_its_node_ask_for_the_leader_until_a_newer_record() -> None:
    node = Node()
    assert not node.way.awaits_generation
    node.exits(1, 100.0)
    assert node.way.awaits_generation
    node.time(100.0 + LEADER_AGAIN_S)
    assert node.asked == [100.0, 100.0 + LEADER_AGAIN_S]
    node.runs(record(2, OWN))
    assert not node.way.awaits_generation
    node.time(200.0)
    assert len(node.asked) == 2, "the leader that wrote it lives"
    node.exits(-9, 300.0)
    assert node.asked[2:] == [300.0], "of each generation anew"


def test_a_worker_that_ends_with_0_is_recorded_beyond_its_nodes_lease() -> None:
    node = Node()
    node.exits(0, 100.0)
    assert node.finished() == [
        pb.Finished(worker_id="a.0.g1", agent_id=OWN, node_name="host-a", generation=1)
    ]


@pytest.mark.parametrize("way", ["it fails", "a newer record ended it", "its node leaves"])
def test_no_other_end_is_recorded_as_one_with_0(way: str) -> None:
    node = Node()
    if way == "a newer record ended it":
        node.way.follow(record(2, OWN))
    node.seen.stopping = way == "its node leaves"
    node.exits(1 if way == "it fails" else 0, 100.0)
    assert node.finished() == []


@pytest.mark.parametrize("way", ["it ends with 0", "a newer record ended it", "the job has a result"])
def test_any_other_end_says_nothing_of_the_leader(way: str) -> None:
    node = Node()
    if way == "a newer record ended it":
        node.way.follow(record(2, OWN))
    node.seen.stopping = way == "the job has a result"
    node.exits(0 if way == "it ends with 0" else 1, 100.0)
    node.time(200.0)
    assert node.asked == []


def test_later_records_do_not_move_the_kill_of_workers_that_end() -> None:
    node = Node()
    node.way.follow(record(2, OTHER, OWN))
    first_s = node.timers.next_in_s(0.0)
    node.way.follow(record(3, OTHER, OWN))
    assert node.timers.next_in_s(0.0) == first_s
    node.time(first_s)
    assert node.kills == 1
    node.exits(-signal.SIGKILL, first_s)
    node.runs(record(3, OTHER, OWN))
    node.way.follow(record(4, OTHER, OWN))
    assert node.timers.next_in_s(0.0) > first_s, "the next workers have a time of their own"
