"""A stall suspicion ends with the wait that it reported; a break only with a generation that ends it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from bagua_agent.base.timers import Timers
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job_state.change_lines import ChangeLines
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import JobView
from bagua_agent.node.live_workers import LiveWorkers
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.rpc.session_server import SessionServer
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind

KEYS = JobKeys("job")


@dataclass
class Node:
    """Stands for store, sessions and workers alike; `keys` is what it keeps under its lease."""

    keys: dict[str, bytes] = field(default_factory=dict)
    exit_comes: bool = False

    def __post_init__(self) -> None:
        self.timers = Timers()
        self.told: list[str] = []
        tells = SimpleNamespace(tell_of_worker=lambda now_s, topic, text: self.told.append(text))
        seen = LocalJobState(pb.JobSpec(), JobView())
        job = SimpleNamespace(
            keys=KEYS,
            leased=self,
            timers=self.timers,
            terminal=tells,
            seen=seen,
            agent_id="a",
            change_lines=ChangeLines(cast(JobTerminal, tells), self.timers, "a"),
        )
        self.ways = LiveWorkers(
            cast(JoinedJob, job),
            cast(NodeWorkers, self),
            cast(SessionServer, self),
            Policy(),
            lambda now_s: None,
            lambda: None,
        )

    def put(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def remove(self, key: str) -> None:
        self.keys.pop(key, None)

    def get(self, worker_id: str) -> object:
        return self

    def an_exit_is_on_its_way(self) -> bool:
        return self.exit_comes

    def tell_generation(self, generation: Generation) -> None: ...

    def suspects(self, kind: int, generation: int = 3) -> None:
        said = session_pb2.Suspected(
            generation=generation, kind=cast(pb.Suspicion.Kind, kind), waited_s=1.5, usual_step_s=0.5
        )
        self.ways.said("w", session_pb2.WorkerMessage(suspected=said), 1.0)

    def goes_on(self, generation: int = 3) -> None:
        said = session_pb2.WentOn(generation=generation)
        self.ways.said("w", session_pb2.WorkerMessage(went_on=said), 2.0)

    @property
    def suspicion(self) -> pb.Suspicion | None:
        value = self.keys.get(KEYS.suspicion("w"))
        return None if value is None else pb.Suspicion.FromString(value)


def test_a_stall_goes_with_its_wait() -> None:
    node = Node()
    node.suspects(pb.Suspicion.STALLED)
    assert node.suspicion is not None
    assert (node.suspicion.waited_s, node.suspicion.usual_step_s) == (1.5, 0.5)
    node.goes_on(generation=2)
    assert node.suspicion is not None, "another wait"
    node.goes_on()
    assert node.suspicion is None
    node.goes_on()


def test_a_break_stands_until_a_generation_ends_it() -> None:
    node = Node()
    node.suspects(pb.Suspicion.STALLED)
    node.suspects(pb.Suspicion.BROKEN)
    node.goes_on()
    assert node.suspicion is not None
    node.ways.follow(Generation(4, 3, GenerationKind.FAILOVER, (), "nonce"))
    assert node.suspicion is None


def test_what_cannot_be_built_is_told_and_does_not_go_with_a_wait() -> None:
    node = Node()
    node.suspects(pb.Suspicion.STALLED)
    assert node.told == [], "it may pass"
    node.suspects(pb.Suspicion.UNBUILT)
    assert node.told == ["a worker here goes on without the pending generation: "]
    node.goes_on()
    assert node.suspicion is not None and node.suspicion.kind == pb.Suspicion.UNBUILT
    node.ways.follow(Generation(4, 3, GenerationKind.FAILOVER, (), "nonce"))
    assert node.suspicion is None


def test_a_break_alone_lets_no_step_follow_before_another_generation() -> None:
    node = Node()
    for kind in (pb.Suspicion.STALLED, pb.Suspicion.UNBUILT):
        node.suspects(kind)
        assert not node.ways.awaits_generation
    node.suspects(pb.Suspicion.BROKEN)
    assert node.ways.awaits_generation
    node.ways.follow(Generation(4, 3, GenerationKind.FAILOVER, (), "nonce"))
    assert not node.ways.awaits_generation


def test_one_line_of_a_kind_is_told_for_each_generation() -> None:
    node = Node()
    for _ in range(3):
        node.suspects(pb.Suspicion.BROKEN)
        node.suspects(pb.Suspicion.UNBUILT)
    assert len(node.told) == 2
    node.ways.follow(Generation(4, 3, GenerationKind.FAILOVER, (), "nonce"))
    node.suspects(pb.Suspicion.BROKEN, generation=4)
    assert len(node.told) == 3


def test_a_kind_of_another_version_reaches_the_store_as_it_is() -> None:
    node = Node()
    node.suspects(9)
    assert node.suspicion is not None and node.suspicion.kind == cast(pb.Suspicion.Kind, 9)


def test_a_stall_that_is_over_before_it_was_told_is_not_told() -> None:
    node = Node(exit_comes=True)
    node.suspects(pb.Suspicion.STALLED)
    node.goes_on()
    node.exit_comes = False
    for due in node.timers.take_due(10.0):
        due(10.0)
    assert node.suspicion is None


def test_a_worker_that_floods_its_agent_with_words_fills_no_log() -> None:
    node = Node()
    lines: list[str] = []
    terminal = JobTerminal(lines.append, "n0")
    node.ways._job.terminal = terminal  # type: ignore[misc]
    node.ways._job.change_lines = ChangeLines(terminal, node.timers, "a")  # type: ignore[misc]
    node.ways._members["w"] = pb.Member(worker_id="w")
    for number in range(20_000):  # in one minute
        now_s = 100.0 + number * 60 / 20_000
        straggler = session_pb2.Straggler(generation=3, global_rank=number, recovered=number % 2 == 0)
        entered = session_pb2.Entered(generation=number, step=number)
        suspected = session_pb2.Suspected(
            generation=3, kind=pb.Suspicion.BROKEN, detail=f"{number}" + "x" * 10_000
        )
        for said in (
            session_pb2.WorkerMessage(straggler=straggler),
            session_pb2.WorkerMessage(entered=entered),
            session_pb2.WorkerMessage(suspected=suspected),
        ):
            node.ways.said("w", said, now_s)
    assert 200 <= len(lines) <= 400 and max(map(len, lines)) < 5000
    assert [line for line in lines if "left out" in line and "they came too fast" in line]
    assert len(terminal._last) < 10, "what is remembered is bounded too"


def test_a_straggler_is_told_with_its_place() -> None:
    node = Node()
    told = session_pb2.Straggler(generation=3, global_rank=1, computing_s=0.3, others_s=0.1)
    node.ways.said("w", session_pb2.WorkerMessage(straggler=told), 1.0)
    assert node.told[0].startswith("global rank 1 is the slowest")
