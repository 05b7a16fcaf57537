"""A job's progress is read from its own keys."""

from __future__ import annotations

import pytest

from bagua_agent.cluster.cluster_records import read_progress
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_contract import membership_pb2 as pb
from tests.agent.cluster_state.test_odd_records import submission

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
    found = read_progress(generation(kind), None, {"a1": ONE, "a2": TWO}, members, (), 0.0)
    assert found.begun and found.arrived == arrived


@pytest.mark.parametrize(
    ("kind", "ready", "arrived"),
    [
        (pb.Generation.RESTART, True, {"one", "two"}),
        (pb.Generation.RESTART, False, {"one"}),
        (pb.Generation.PLANNED, True, {"one"}),
    ],
)
def test_in_restart_mode_a_node_has_arrived_when_its_agent_can_start_workers(
    kind: pb.Generation.Kind, ready: bool, arrived: set[str]
) -> None:
    two = pb.Agent(agent_id="a2", node_name="two", slots=2, ready=ready).SerializeToString()
    assert read_progress(generation(kind), None, {"a1": ONE, "a2": two}, {}, (), 0.0).arrived == arrived


def replica(nodes: str, over: str = "") -> bytes:
    """With one worker for each letter, on the node of that name."""
    members = [
        pb.ReplicaMember(worker_id=f"{n}.{i}", agent_id=n, node_name=n, slot=i) for i, n in enumerate(nodes)
    ]
    return pb.Replica(replica_id=f"{nodes[0]}.0", members=members, over=over).SerializeToString()


def test_replicas_are_the_nodes_that_hold_one_together() -> None:
    def found(*records: bytes) -> tuple[frozenset[str], ...]:
        return read_progress(generation(pb.Generation.PLANNED), None, {}, {}, records, 0.0).replicas

    assert found() == (), "each worker is a replica"
    assert found(replica("ab"), replica("cd")) == (frozenset("ab"), frozenset("cd"))
    assert found(replica("aab"), replica("bcc")) == (frozenset("ab"), frozenset("bc"))
    assert found(replica("aa"), replica("bc")) == (frozenset("bc"),), "one within a node is lost with it"
    assert found(replica("ab", over="b is gone"), replica("ca")) == (frozenset("ac"),)
    assert found(b"\xff\xff", replica("ab")) == (frozenset("ab"),)


def test_a_member_record_that_cannot_be_read_has_not_arrived() -> None:
    members = {"a2.0": b"\xff\xff", **member("a2.1", pb.LOOP)}
    found = read_progress(generation(pb.Generation.PLANNED), None, {"a1": ONE, "a2": TWO}, members, (), 0.0)
    assert found.arrived == {"one"}


def test_a_cluster_reads_the_replicas_of_a_job_whose_generation_is_in_parts() -> None:
    """In a job of hundreds of workers the generation's key has only a head, which lists no worker."""
    keys = JobKeys("x")
    head = pb.Generation(number=3, parts=pb.RecordParts(folder="3-a", count=1)).SerializeToString()
    picture = ClusterPicture(0.0, pytest.fail)

    def take(key: str, value: bytes | None) -> tuple[frozenset[str], ...]:
        picture.take([Change(key, value, 1, 1)], 0.0)
        return picture.view().progress["x"].replicas

    picture.take([Change(cluster_keys.submission("x"), submission("x"), 1, 1)], 0.0)
    assert take(keys.generation, head) == ()
    assert take(keys.replica("a.0"), replica("ab")) == (frozenset("ab"),)
    assert take(keys.replica("a.0"), replica("ab", over="b is gone")) == ()
    assert take(keys.replica("c.0"), replica("cd")) == (frozenset("cd"),)
    assert take(keys.replica("c.0"), None) == ()
