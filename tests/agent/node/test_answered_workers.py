"""An agent ends the workers that a training job answered, when the job begins again before the loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership.policy import Policy
from bagua_agent.node.live_workers import STARTS_AGAIN, LiveWorkers
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.rpc.session_server import SessionServer
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement

TRAINS = Generation(2, 0, GenerationKind.PLANNED, ())
LISTED = Placement("w", "a", "host-a", 0, 0, 0, 0, "h:2", 3, 1, False)
GATHERS = Generation(3, 0, GenerationKind.GATHERING, (LISTED,), again=True)


class Node:
    """A node with the worker "w". killed: why it was."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        worker = SimpleNamespace(slot=0, was_ready=False)
        workers = SimpleNamespace(
            get=lambda worker_id: worker, kill=lambda worker_id, why: self.killed.append(why)
        )
        seen = SimpleNamespace(generation=TRAINS, spec=SimpleNamespace(nonce="n"))
        nothing = SimpleNamespace(put=lambda key, value: None, tell_generation=lambda generation: None)
        self.job = SimpleNamespace(
            keys=JobKeys("job"), leased=nothing, seen=seen, agent_id="a", timers=None, terminal=None
        )
        self.ways = LiveWorkers(
            cast(JoinedJob, self.job),
            cast(NodeWorkers, workers),
            cast(SessionServer, nothing),
            Policy(),
            lambda now_s: None,
            lambda: None,
        )

    def says(self, stage: pb.Stage, gathering: int = 0) -> None:
        ready = session_pb2.Ready(stage=stage, gathering=gathering)
        self.ways.said("w", session_pb2.WorkerMessage(ready=ready), 1.0)

    def sees(self, record: Generation) -> None:
        self.job.seen.generation = record
        self.ways.follow(record)


@pytest.mark.parametrize("later", [(), (pb.LOOP,)], ids=["before its first step", "at its first step"])
def test_a_worker_that_was_answered_is_ended_though_the_gathering_lists_it(
    later: tuple[pb.Stage, ...],
) -> None:
    node = Node()
    for stage in (pb.WAITING, pb.PREPARING, *later):
        node.says(stage)
    assert node.killed == []
    node.sees(GATHERS)
    assert node.killed == [STARTS_AGAIN]


def test_an_answer_that_is_void_by_now_ends_its_worker() -> None:
    node = Node()
    node.says(pb.WAITING)
    node.sees(GATHERS)
    assert node.killed == []
    node.says(pb.PREPARING)
    assert node.killed == [STARTS_AGAIN]


def test_a_worker_of_the_gathering_goes_on() -> None:
    node = Node()
    node.says(pb.WAITING)
    node.sees(GATHERS)
    node.says(pb.PREPARING, gathering=3)
    node.says(pb.LOOP)
    node.sees(GATHERS)
    assert node.killed == []
