"""The replicas that the status of a job shows."""

from __future__ import annotations

from bagua_agent.cluster_client.replica_status import ReplicaStatus, replicas_of
from bagua_agent.etcd.client import KeyValue
from bagua_contract.records import Generation, GenerationKind, Placement
from bagua_contract.replica import Replica, ReplicaMember


def generation(size: int, *nodes: str) -> Generation:
    members = tuple(
        Placement(f"w{rank}", node, node, 0, rank, rank, 0, "h:1", 1, 10 + rank, True, *divmod(rank, size))
        for rank, node in enumerate(nodes)
    )
    return Generation(number=2, base=0, kind=GenerationKind.PLANNED, members=members)


def record(*workers: str, over: str = "") -> KeyValue:
    members = tuple(ReplicaMember(w, w, f"node-{w}", 1, "h:1") for w in workers)
    return KeyValue(f"replicas/{workers[0]}", Replica(workers[0], members, over=over).encode(), 1, 1)


def test_members_come_by_rank_and_the_others_behind_them() -> None:
    records = [record("w0", "w1"), record("y", "z"), record("x", "v", over="w is gone")]
    records.append(KeyValue("replicas/odd", b"\xff", 1, 1))
    assert replicas_of(generation(2, "a", "b", "c", "d"), records) == (
        ReplicaStatus(0, "member", (("a", 0), ("b", 0))),
        ReplicaStatus(1, "member", (("c", 0), ("d", 0))),
        ReplicaStatus(None, "over: w is gone", (("node-x", 1), ("node-v", 1))),
        ReplicaStatus(None, "joins", (("node-y", 1), ("node-z", 1))),
    )


def test_a_job_whose_workers_are_replicas_has_none_to_show() -> None:
    assert replicas_of(generation(1, "a", "b"), []) == ()
    assert replicas_of(None, []) == ()
