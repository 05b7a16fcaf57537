from dataclasses import replace

import pytest

from bagua_contract import membership_pb2 as pb
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.replica import Replica, ReplicaMember


def member(name: str, slot: int = 0) -> ReplicaMember:
    return ReplicaMember(f"{name}.{slot}.x", name, f"node-{name}", slot, f"127.0.0.1:{7000 + slot}")


def replica(**changes: object) -> Replica:
    fields = {"replica_id": "r-1", "members": (member("a"), member("b")), "nonce": "n", **changes}
    return Replica(**fields)  # type: ignore[arg-type]


def test_a_replica_keeps_its_shards_in_order_through_its_record():
    told = replica(over="worker b.0.x is lost")
    assert Replica.decode(told.encode()) == told
    assert (told.size, told.worker_ids, told.agent_ids) == (2, ("a.0.x", "b.0.x"), {"a", "b"})
    assert [told.shard_of(w) for w in ("a.0.x", "b.0.x", "c.0.x")] == [0, 1, None]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"replica_id": ""}, "no id"),
        ({"members": (member("a"),)}, "at least 2"),
        ({"members": (member("a"), member("a"))}, "twice"),
        ({"members": (member("a"), ReplicaMember("", "b", "", 0, ""))}, "without an id"),
    ],
)
def test_what_is_no_replica_is_refused(changes: dict[str, object], says: str):
    with pytest.raises(ValueError, match=says):
        replica(**changes)


def test_a_record_of_an_older_leader_has_no_control_addresses():
    told = replica(members=(member("a"), member("b")))
    assert Replica.decode(told.encode()) == told and told.members[0].control_address == ""
    newer = replica(members=tuple(replace(m, control_address=f"{m.agent_id}:9") for m in told.members))
    assert Replica.decode(newer.encode()) == newer


def test_a_record_without_replicas_is_encoded_as_before():
    assert (
        pb.Placement(worker_id="w").SerializeToString()
        == pb.Placement(worker_id="w", replica_rank=0, shard_rank=0).SerializeToString()
    )
    environment = WorkerEnvironment("j", "w", "a", "/s", "127.0.0.1", 0, 1)
    assert environment.replica_size == 1
    assert WorkerEnvironment.decode(environment.encode()) == environment
