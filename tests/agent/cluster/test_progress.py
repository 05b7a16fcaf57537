"""A job's progress is read from its own keys."""

from __future__ import annotations

import pytest

from bagua_agent.cluster.cluster_records import read_progress
from bagua_contract import membership_pb2 as pb

ONE = pb.Agent(agent_id="a1", node_name="one", slots=2).SerializeToString()
TWO = pb.Agent(agent_id="a2", node_name="two", slots=2).SerializeToString()


def member(worker_id: str, stage: pb.Stage) -> dict[str, bytes]:
    return {worker_id: pb.Member(worker_id=worker_id, stage=stage).SerializeToString()}


def generation(kind: pb.Generation.Kind) -> bytes:
    placed = [pb.Placement(worker_id=f"a1.{slot}", agent_id="a1", slot=slot) for slot in range(2)]
    return pb.Generation(number=3, kind=kind, members=placed).SerializeToString()


@pytest.mark.parametrize("kind", [pb.Generation.PLANNED, pb.Generation.GATHERING])
@pytest.mark.parametrize(
    "stages, arrived",
    [
        ((pb.WAITING, pb.WAITING), {"one"}),
        ((pb.PREPARING, pb.WAITING), {"one"}),
        ((pb.LOOP, pb.WAITING), {"one"}),
        ((pb.LOOP, pb.LOOP), {"one", "two"}),
    ],
)
def test_a_node_has_arrived_when_all_its_workers_can_be_taken_in(
    kind: pb.Generation.Kind, stages: tuple[pb.Stage, pb.Stage], arrived: set[str]
) -> None:
    members = {w: v for slot, stage in enumerate(stages) for w, v in member(f"a2.{slot}", stage).items()}
    found = read_progress(generation(kind), None, {"a1": ONE, "a2": TWO}, members, 0.0)
    assert found.begun and found.arrived == arrived


def replicas_of(size: int, *nodes: str) -> tuple[frozenset[str], ...]:
    """In a generation of workers on these nodes, in replicas of `size`."""
    placed = [
        pb.Placement(worker_id=f"{n}.{i}", agent_id=n, node_name=n, global_rank=i, replica_rank=i // size,
                     shard_rank=i % size)
        for i, n in enumerate(nodes)
    ]  # fmt: skip
    record = pb.Generation(number=3, kind=pb.Generation.PLANNED, members=placed).SerializeToString()
    return read_progress(record, None, {}, {}, 0.0).replicas


def test_replicas_are_the_nodes_that_hold_one_together() -> None:
    assert replicas_of(2, "a", "b", "c", "d") == (frozenset("ab"), frozenset("cd"))
    assert replicas_of(3, "a", "a", "b", "b", "c", "c") == (frozenset("ab"), frozenset("bc"))
    assert replicas_of(2, "a", "a", "b", "c") == (frozenset("bc"),), "one within a node is lost with it"


def test_a_job_whose_workers_are_replicas_names_none() -> None:
    placed = [
        pb.Placement(worker_id=f"{n}.0", agent_id=n, node_name=n, global_rank=i) for i, n in enumerate("ab")
    ]
    record = pb.Generation(number=3, kind=pb.Generation.PLANNED, members=placed).SerializeToString()
    assert read_progress(record, None, {}, {}, 0.0).replicas == ()


def test_a_member_record_that_cannot_be_read_has_not_arrived() -> None:
    members = {"a2.0": b"\xff\xff", **member("a2.1", pb.LOOP)}
    found = read_progress(generation(pb.Generation.PLANNED), None, {"a1": ONE, "a2": TWO}, members, 0.0)
    assert found.arrived == {"one"}
