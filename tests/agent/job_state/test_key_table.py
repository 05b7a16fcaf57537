"""Every key of a job has its row: how it is decoded, how it comes back after a loss, and what removes it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_agent.etcd.client import Compare, Put, Store, Transaction, absent
from bagua_agent.etcd.keys import KEY_TABLE, AfterLoss, JobKey, JobKeys, Removal
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.job_state.decode import DECODERS, StoreEvents
from bagua_agent.leadership.leadership import Leadership
from bagua_agent.leadership.reports import Report
from bagua_agent.lost_store.recreation import Memory, PutAgain, after_a_loss
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import ResultOutcome
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind
from bagua_contract.replica import Replica, ReplicaMember
from tests.lab.wait import HANG_S

KEYS = JobKeys("job")
SPEC = pb.JobSpec(nonce="ours")
RECORD = Generation(3, 2, GenerationKind.FAILOVER, (), "ours")
ROWS = sorted(KEY_TABLE)
REPLICA = Replica("x", tuple(ReplicaMember(w, w, f"host-{w}", 0, f"{w}:1") for w in "xy"), "ours")

# By name in KEY_TABLE: a value that can be read, and the event of its removal.
VALUES: dict[str, bytes] = {
    "spec": SPEC.SerializeToString(),
    "desired": pb.Desired(min_nodes=1, max_nodes=2).SerializeToString(),
    "settings": pb.PinnedSettings().SerializeToString(),
    "generation": RECORD.encode(),
    "hang": pb.HangOrder(outcome=pb.HangOrder.NAME).SerializeToString(),
    "closing": pb.Closing(worker_id="x", generation=3).SerializeToString(),
    "result": pb.Result(outcome=pb.Result.FAILED).SerializeToString(),
    "agents": pb.Agent(agent_id="x").SerializeToString(),
    "members": pb.Member(worker_id="x").SerializeToString(),
    "suspicions": pb.Suspicion(worker_id="x", kind=pb.Suspicion.BROKEN).SerializeToString(),
    "failures": pb.Failure(worker_id="x").SerializeToString(),
    "finished_workers": pb.Finished(worker_id="x").SerializeToString(),
    "departures": pb.Departure(worker_id="x").SerializeToString(),
    "refusals": pb.Refusal(worker_id="x").SerializeToString(),
    "replicas": REPLICA.encode(),
    "study": pb.Study().SerializeToString(),
}
REMOVALS: dict[str, type[ev.Event]] = {
    "hang": ev.HangOrderSeen,
    "agents": ev.AgentGone,
    "members": ev.MemberGone,
    "suspicions": ev.SuspicionCleared,
    "replicas": ev.ReplicaGone,
}


def key_of(row: JobKey) -> str:
    """A key of the row, of the id "x" if it has one for each id."""
    return row.__get__(KEYS, JobKeys) + ("x" if row.is_folder else "")


def test_each_row_has_a_decoder_or_states_that_it_has_no_event() -> None:
    assert DECODERS.keys() == KEY_TABLE.keys()
    assert VALUES.keys() == {name for name, decoder in DECODERS.items() if decoder is not None}


@pytest.mark.parametrize("name", ROWS)
def test_a_key_is_found_in_its_own_row_and_job(name: str) -> None:
    row = KEY_TABLE[name]
    assert KEYS.row_of(key_of(row)) == (row, "x" if row.is_folder else "")
    assert JobKeys("other").row_of(key_of(row)) is None
    assert KEYS.row_of(key_of(row) + "/below") is None
    if row.is_folder:
        assert KEYS.row_of(row.__get__(KEYS, JobKeys)) is None, "a folder is no key"
    assert any(key_of(row) in keys for keys in KEYS.ranges), "it would outlive its job"


@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_decoded_by_its_row(name: str) -> None:
    unreadable: list[str] = []
    events = StoreEvents(KEYS, lambda key, why: unreadable.append(f"{key}: {why}"))
    put = events.event_of(Change(key_of(KEY_TABLE[name]), VALUES.get(name, b"\xff"), 5, 5), 1.0)
    assert (put is not None) == (name in VALUES) and not unreadable
    gone = events.event_of(Change(key_of(KEY_TABLE[name]), None, 6, 5), 1.0)
    assert type(gone) is REMOVALS.get(name, type(None))


def test_keys_come_back_after_a_loss_as_their_rows_state() -> None:
    """Of a job that is under way: one that has ended puts its result, and no key that agents need."""
    running = [row for row in KEY_TABLE.values() if row.name != "result"]
    told = {
        key_of(row): VALUES.get(row.name, b"value") for row in running if row.after_loss not in NOT_REMEMBERED
    }
    verdict = after_a_loss(KEYS, Memory("ours", told, RECORD, committed=True), {})
    assert isinstance(verdict, PutAgain)
    assert {put.key for put in verdict.puts} == {
        key_of(row) for row in running if row.after_loss in PUT_BY_AGENTS
    }


PUT_BY_AGENTS = {
    AfterLoss.PUT_AGAIN,
    AfterLoss.PUT_OVER_A_NEW_JOB,
    AfterLoss.NEWEST_RECORD,
    AfterLoss.WITH_SPEC,
}
NOT_REMEMBERED = {AfterLoss.NEWEST_RECORD, AfterLoss.LEASED, AfterLoss.STAYS_LOST}


class Leader:
    """A leader whose writes are recorded, not made."""

    def __init__(self) -> None:
        self.deleted: set[str] = set()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        leased: Any = SimpleNamespace()
        self.leadership = Leadership(
            cast(Store, self),
            KEYS,
            cast(LeasedKeys, leased),
            cast(JobIdentity, None),
            0.5,
            self.reports.put,
            cast(Any, None),
        )

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Transaction:
        self.deleted |= set(deletes)
        return Transaction(True, 1)

    def deletions(self) -> set[str]:
        self.reports.get(timeout=HANG_S)
        self.leadership.stop()
        return self.deleted


def rows_removed(*ways: Removal) -> set[str]:
    return {key_of(row) for row in KEY_TABLE.values() if row.removal in ways}


def test_a_dead_leader_loses_the_keys_whose_rows_state_it() -> None:
    leader = Leader()
    leader.leadership.election.remove_dead_leader("x", 4, 5, ["x"])
    assert leader.deletions() == rows_removed(
        Removal.WITH_LEADER, Removal.WITH_AGENT, Removal.WITH_AGENTS_WORKERS
    )


def test_a_dead_agent_loses_the_keys_whose_rows_state_it() -> None:
    leader = Leader()
    leader.leadership.writes.remove_agent("x", 5, ["x"])
    assert leader.deletions() == rows_removed(Removal.WITH_AGENT, Removal.WITH_AGENTS_WORKERS)


def test_a_result_removes_the_keys_whose_rows_state_it() -> None:
    leader = Leader()
    leader.leadership.writes.write_result(absent(KEYS.result), ResultOutcome.SUCCEEDED, 0, "", None)
    assert leader.deletions() == rows_removed(Removal.WITH_RESULT)
