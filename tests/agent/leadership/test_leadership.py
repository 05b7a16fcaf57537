"""A leader's failed writes: each is answered, and an agent that can't lead gives the leadership up."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.errors import InternalError, StoreUnavailable, UserError
from bagua_agent.base.timers import Timers
from bagua_agent.etcd.client import MOST_OPERATIONS_IN_A_TRANSACTION, Compare, Put, Store, Transaction
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.job.membership_driver import STAND_AFTER_RESIGNING_S, STAND_AGAIN_S, JobMembership
from bagua_agent.job.messages import LeadershipReported
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.large_jobs.record_parts import StoredRecord
from bagua_agent.leadership.leadership import Leadership
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import ResultOutcome
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import AgentView, JobView, MemberView
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation

DEADLINE_S = 10.0
AGENT = "a"
LOST = StoreUnavailable("etcd is away")
DENIED = UserError("etcd denies it")


class Etcd:
    """Store and lease alike: keeps keys without comparing, and fails as told."""

    def __init__(self) -> None:
        self.stands: set[str] = set()
        self.transactions: list[tuple[str, ...]] = []  # the keys of each
        self.failures: list[BaseException] = []  # what the next writes raise

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Transaction:
        if len(puts) + len(deletes) > MOST_OPERATIONS_IN_A_TRANSACTION:
            raise InternalError("more than etcd takes in a transaction")
        if self.failures:
            raise self.failures.pop(0)
        self.transactions.append((*(put.key for put in puts), *deletes))
        self.stands = (self.stands | {put.key for put in puts}) - set(deletes)
        return Transaction(True, len(self.transactions))

    def put_if_absent(self, key: str, value: bytes) -> int | None:
        if self.failures:
            raise self.failures.pop(0)
        self.stands.add(key)
        return 1

    def remove(self, key: str) -> None:
        self.stands.discard(key)


class Node:
    """The membership of one agent, which stands for election, and the part of the agent's loop that it needs."""

    def __init__(self) -> None:
        self.etcd = Etcd()
        self.keys = JobKeys("job")
        self.inbox: queue.SimpleQueue[LeadershipReported] = queue.SimpleQueue()
        self.said: list[str] = []
        self.timers = Timers()
        self.seen = LocalJobState(pb.JobSpec(nonce="nonce"), JobView())
        leased = cast(LeasedKeys, self.etcd)
        job = SimpleNamespace(
            agent_id=AGENT,
            keys=self.keys,
            seen=self.seen,
            timers=self.timers,
            terminal=JobTerminal(self.said.append, "host"),
            history=SimpleNamespace(leader_is=lambda agent_id, leading: None),
        )

        def stored(generation: Generation, addresses: Mapping[str, str]) -> StoredRecord:
            return StoredRecord(b"record", ())

        self.leadership = Leadership(
            cast(Store, self.etcd),
            self.keys,
            leased,
            cast(JobIdentity, None),
            0.5,
            lambda report: self.inbox.put(LeadershipReported(report)),
            stored,
        )
        self.membership = JobMembership(
            cast(JoinedJob, job), Policy(), self.leadership, "host:1", lambda key: None
        )

    def hear(self) -> LeadershipReported:
        """The next report, taken as the loop takes it."""
        message = self.inbox.get(timeout=DEADLINE_S)
        self.membership.take(message.report, time.monotonic())
        return message

    def lead(self) -> None:
        self.membership.follow_leader(time.monotonic())
        self.hear()
        assert self.membership.leading and self.keys.leader in self.etcd.stands

    def worker_ready(self) -> None:
        """A worker is ready: the leader writes a generation of it."""
        now_s = time.monotonic()
        self.membership.advance(
            ev.DesiredChanged(now_s=now_s, min_nodes=1, max_nodes=1),
            ev.AgentSeen(
                now_s=now_s,
                agent=AgentView(
                    agent_id=AGENT,
                    node_name="host",
                    slots=1,
                    topology="",
                    leaving=False,
                    control_address="host:1",
                    join_revision=1,
                ),
            ),
            ev.MemberReady(
                now_s=now_s,
                nonce="nonce",
                member=MemberView(
                    worker_id="a0",
                    agent_id=AGENT,
                    slot=0,
                    store_address="10.0.0.1:2",
                    fingerprint={},
                    committed_generation=0,
                    join_revision=2,
                ),
            ),
        )

    def wait_until(self, now_s: float) -> None:
        """Timers that are due by then, as the loop calls them."""
        for due in self.timers.take_due(now_s):
            due(now_s)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.leadership.stop()


def test_a_generation_is_written(node: Node) -> None:
    node.lead()
    node.worker_ready()
    node.hear()
    assert node.etcd.transactions == [(node.keys.generation,)] and node.membership.leading


@pytest.mark.parametrize("error", [DENIED, InternalError("refused"), RuntimeError("bug"), MemoryError()])
def test_a_leader_whose_write_is_refused_lets_another_lead_and_stands_again(
    node: Node, error: BaseException
) -> None:
    node.lead()
    node.etcd.failures = [error]
    node.worker_ready()
    node.hear()
    assert node.etcd.failures == [], "the write was refused"
    assert not node.membership.leading and node.keys.leader not in node.etcd.stands
    assert "writing generation 1 failed" in node.said[-1]

    node.membership.follow_leader(time.monotonic())  # it sees that its key is gone
    later_s = time.monotonic() + STAND_AFTER_RESIGNING_S
    node.wait_until(later_s - 1.0)
    assert node.inbox.empty(), "another agent is given the time to be elected"
    node.wait_until(later_s)
    node.hear()
    assert node.membership.leading
    node.hear()
    assert node.etcd.transactions == [(node.keys.generation,)]


def test_a_leader_goes_on_after_an_outage(node: Node) -> None:
    node.lead()
    node.etcd.failures = [LOST]
    node.worker_ready()
    node.hear()
    assert node.membership.leading and node.keys.leader in node.etcd.stands
    node.wait_until(time.monotonic() + Policy().write_retry_s)
    node.hear()
    assert node.etcd.transactions == [(node.keys.generation,)]


@pytest.mark.parametrize("error", [LOST, DENIED, RuntimeError("bug")])
def test_an_election_that_fails_is_followed_by_another(node: Node, error: BaseException) -> None:
    node.etcd.failures = [error]
    node.membership.follow_leader(time.monotonic())
    node.hear()
    assert not node.membership.leading and node.etcd.failures == []
    node.wait_until(time.monotonic() + STAND_AFTER_RESIGNING_S)
    node.hear()
    assert node.membership.leading


def test_an_agent_that_has_the_key_and_does_not_lead_stands_again(node: Node) -> None:
    """etcd carried an election out, and its answer was lost."""
    node.etcd.failures = [LOST]
    node.membership.follow_leader(time.monotonic())
    node.seen.leader = LeaderKey(AGENT, "host:1", 1)
    node.hear()
    node.membership.follow_leader(time.monotonic())
    assert not node.membership.leading
    node.wait_until(time.monotonic() + STAND_AGAIN_S)
    node.hear()
    assert node.membership.leading


def test_the_second_answer_to_one_election_changes_nothing(node: Node) -> None:
    node.lead()
    node.worker_ready()
    node.hear()
    node.said.clear()
    node.leadership.election.stand(AGENT, "host:1")
    node.hear()
    assert node.membership.leading and node.said == []
    assert node.etcd.transactions == [(node.keys.generation,)]


@pytest.mark.parametrize("workers", [1, 63, 64, 300])
def test_a_dead_agent_of_any_size_is_removed_its_own_key_last(node: Node, workers: int) -> None:
    node.lead()
    ids = [f"b.{n}" for n in range(workers)]
    expected = {node.keys.agent("b"), *(f(w) for w in ids for f in (node.keys.member, node.keys.suspicion))}
    node.etcd.stands |= expected
    node.leadership.writes.remove_agent("b", 7, ids)
    node.hear()
    assert not expected & node.etcd.stands
    assert node.etcd.transactions[-1][-1] == node.keys.agent("b")
    assert node.membership.leading


WRITES: dict[str, Callable[[Leadership, JobKeys], None]] = {
    "removal of a dead leader": lambda leads, keys: leads.election.remove_dead_leader("b", 1, 7, ["b.0"]),
    "result": lambda leads, keys: leads.writes.write_result(
        Compare(keys.result, "MOD", 0), ResultOutcome.SUCCEEDED, 0, "done", None
    ),
    "refusal": lambda leads, keys: leads.writes.refuse("b.0", "another model"),
    "hang order": lambda leads, keys: leads.writes.write_hang_order(None),
    "removal of an agent": lambda leads, keys: leads.writes.remove_agent("b", 7, ["b.0"]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("error", [None, LOST, DENIED, RuntimeError("bug")], ids=repr)
def test_every_write_has_one_answer(
    node: Node, write: Callable[[Leadership, JobKeys], None], error: BaseException | None
) -> None:
    node.lead()
    node.etcd.failures = [] if error is None else [error]
    write(node.leadership, node.keys)
    node.hear()
    assert node.etcd.failures == [] and node.inbox.empty()
    assert node.membership.leading is (error is None or error is LOST)


def test_an_election_that_is_won_after_the_resignation_is_given_back(node: Node) -> None:
    node.lead()
    node.etcd.failures = [DENIED]
    node.worker_ready()
    node.leadership.election.stand(AGENT, "host:1")  # waits behind the write that will be refused
    node.hear()
    assert not node.membership.leading
    node.hear()
    assert not node.membership.leading and node.keys.leader not in node.etcd.stands
