"""How do the leader's decisions reach the store? Election, fenced writes, probes.

Owns the leadership key and the transactions that it fences. Runs store operations in one thread of its own, so
that the agent's loop never waits for etcd; every outcome comes back through `report`, failures included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bagua_agent.errors import InfrastructureLost
from bagua_agent.failpoints import Failpoints
from bagua_agent.large_jobs.record_parts import StoredRecord
from bagua_agent.membership import hang
from bagua_agent.membership.actions import Outcome, Question
from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.view import Verdict
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_agent.rpc.prober import probe, probe_through
from bagua_agent.store.client import (
    Compare,
    Put,
    Store,
    create_revision_is,
    mod_revision_is,
)
from bagua_agent.store.key_range import KeyRange
from bagua_agent.store.keys import JobKeys
from bagua_agent.store.leased_keys import LeasedKeys
from bagua_contract import control_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation

log = logging.getLogger(__name__)

# Whoever can't reach etcd for longer than this may itself be what is cut off: its word is stale by then.
REMOVAL_TIMEOUT_S = 1.0

HANG_OUTCOMES = {
    hang.Outcome.NAME: pb.HangOrder.NAME,
    hang.Outcome.RENEW: pb.HangOrder.RENEW,
    hang.Outcome.REPLACE: pb.HangOrder.REPLACE,
    hang.Outcome.GIVE_UP: pb.HangOrder.GIVE_UP,
    hang.Outcome.DISAGREE: pb.HangOrder.DISAGREE,
}

_VERDICTS = {
    control_pb2.ProbeReply.ALIVE: Verdict.ALIVE,
    control_pb2.ProbeReply.REFUSED: Verdict.REFUSED,
    control_pb2.ProbeReply.UNANSWERED: Verdict.UNANSWERED,
}


@dataclass(frozen=True, slots=True)
class Elected:
    create_revision: int


@dataclass(frozen=True, slots=True)
class NotElected:
    pass


@dataclass(frozen=True, slots=True)
class GenerationRefused:
    """The transaction was not done, or nobody knows: read the record that stands there."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    agent_id: str
    sequence: int
    relayed: bool
    verdict: Verdict
    workers: tuple[str, ...] | None = None  # alive there, if it answered


def _result(question: Question, sequence: int, relayed: bool, reply: control_pb2.ProbeReply) -> ProbeResult:
    verdict = _VERDICTS[reply.verdict]
    workers = tuple(reply.workers) if verdict is Verdict.ALIVE else None
    return ProbeResult(question.agent_id, sequence, relayed, verdict, workers)


Report = Elected | NotElected | GenerationRefused | WriteFailed | ProbeResult


class Leadership:
    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        leased: LeasedKeys,
        identity: JobIdentity,
        probe_window_s: float,
        report: Callable[[Report], None],
        stored: Callable[[Generation, Mapping[str, str]], StoredRecord],
    ) -> None:
        """stored(record, addresses of agents): how a record is written."""
        self._stored = stored
        self._store = store
        self._keys = keys
        self._leased = leased
        self._identity = identity
        self._probe_window_s = probe_window_s
        self._report = report
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bagua-leader")
        self._probers = ThreadPoolExecutor(16, thread_name_prefix="bagua-probe")
        self._fence = 0
        self._failpoints = Failpoints.from_environment()

    # -- election

    def stand(self, agent_id: str, control_address: str) -> None:
        """Try to become the leader. Reports Elected or NotElected."""
        value = pb.Leader(agent_id=agent_id, control_address=control_address).SerializeToString()

        def elect() -> None:
            try:
                self._failpoints.reach("election.before")
                revision = self._leased.put_if_absent(self._keys.leader, value)
                if revision is not None:
                    self._failpoints.reach("election.after")
            except InfrastructureLost as error:
                self._report(WriteFailed("election", str(error)))
                return
            if revision is None:
                self._report(NotElected())
            else:
                self._fence = revision
                self._report(Elected(revision))

        self._submit(elect)

    def lost(self) -> None:
        """The key is not ours any more. Writes under way fail by themselves: they are fenced."""
        self._fence = 0

    def remove_dead_leader(
        self, agent_id: str, create_revision: int, agent_revision: int, worker_ids: Sequence[str]
    ) -> None:
        """Remove the keys of a leader whose death was confirmed: its leadership and its part in the job, in one
        transaction. create_revision: of its leadership; agent_revision: of its agent key. If either has changed,
        nothing is removed. agent_revision 0: its leadership alone is removed; its other keys are not seen here."""
        compares = [create_revision_is(self._keys.leader, create_revision)]
        deletes = [self._keys.leader]
        if agent_revision:
            compares.append(create_revision_is(self._keys.agent(agent_id), agent_revision))
            deletes += self._keys_of(agent_id, worker_ids)

        def remove() -> None:
            self._transact(
                "leader-removal",
                "removing a dead leader's keys",
                compares,
                deletes=deletes,
                timeout_s=REMOVAL_TIMEOUT_S,
            )

        self._submit(remove)

    def _keys_of(self, agent_id: str, worker_ids: Sequence[str]) -> list[str]:
        """An agent's part in the job, with that of its workers."""
        keys = [self._keys.agent(agent_id)]
        for worker_id in worker_ids:
            keys += [self._keys.member(worker_id), self._keys.suspicion(worker_id)]
        return keys

    # -- fenced writes

    def write_generation(
        self,
        generation: Generation,
        previous_mod_revision: int,
        unended: Compare,
        addresses: Mapping[str, str],
    ) -> None:
        """previous_mod_revision: of what stands where `generation` will; 0 if nothing does. unended: that the job
        has no result. addresses: of the agents' control services."""
        fence = self._fence
        what = f"writing generation {generation.number}"

        def write() -> None:
            form = self._stored(generation, addresses)
            refused = self._put_parts(form.parts) or self._transact(
                "generation",
                what,
                [
                    create_revision_is(self._keys.leader, fence),
                    mod_revision_is(self._keys.generation, previous_mod_revision),
                    unended,
                ],
                puts=[Put(self._keys.generation, form.value)],
                quiet=True,
                generation=generation.number,
            )
            if refused:
                self._report(GenerationRefused(generation.number, refused))
            elif form.parts:
                self._remove_parts_before(generation.number - 1)

        self._submit(write)

    def _put_parts(self, parts: Sequence[Put]) -> str:
        """Empty if they stand, else why not. Not fenced: nobody reads what no head points to."""
        try:
            for part in parts:
                self._store.put(part.key, part.value)
        except InfrastructureLost as error:
            return str(error)
        return ""

    def _remove_parts_before(self, number: int) -> None:
        """Of records that nobody needs any more. One that could not be removed goes with the next."""
        first, end = (f"{self._keys.records}{n:020d}".encode() for n in (0, number))
        try:
            self._store.delete_range(KeyRange(first, end))
        except InfrastructureLost as error:
            log.info("records before generation %d stay for now: %s", number, error)

    def write_result(
        self,
        unended: Compare,
        outcome: Outcome,
        exit_code: int,
        reason: str,
        failure: pb.Failure | None,
        casualties: str = "",
    ) -> None:
        result = pb.Result(
            outcome=outcome.value,
            exit_code=exit_code,
            reason=reason,
            failure=failure,
            casualties=casualties,
        )
        self._fenced(
            "result",
            "writing the result",
            [unended],
            puts=[Put(self._keys.result, result.SerializeToString())],
            deletes=[self._keys.identity],  # nobody joins any more
        )

    def refuse(self, worker_id: str, difference: str) -> None:
        refusal = pb.Refusal(worker_id=worker_id, difference=difference)
        self._fenced(
            "refusal",
            f"refusing {worker_id}",
            puts=[Put(self._keys.refused(worker_id), refusal.SerializeToString())],
        )

    def write_hang_order(self, order: HangOrder | None) -> None:
        """None: nobody is late any more."""
        if order is None:
            self._fenced("hang-order", "removing the hang order", deletes=[self._keys.hang])
            return
        value = pb.HangOrder(
            generation=order.generation,
            outcome=HANG_OUTCOMES[order.outcome],
            workers=order.workers,
            reason=order.reason,
        )
        self._fenced(
            "hang-order",
            "writing the hang order",
            puts=[Put(self._keys.hang, value.SerializeToString())],
        )

    def remove_agent(self, agent_id: str, join_revision: int, worker_ids: list[str]) -> None:
        """Remove a dead agent's keys, if its key is still the one that was confirmed dead."""
        self._fenced(
            "agent-removal",
            f"removing the dead agent {agent_id}",
            [create_revision_is(self._keys.agent(agent_id), join_revision)],
            deletes=self._keys_of(agent_id, worker_ids),
        )

    def _fenced(
        self,
        point: str,
        what: str,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> None:
        fence = self._fence
        self._submit(
            lambda: self._transact(
                point, what, [create_revision_is(self._keys.leader, fence), *compares], puts, deletes
            )
        )

    def _transact(
        self,
        point: str,
        what: str,
        compares: Sequence[Compare],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        quiet: bool = False,
        timeout_s: float | None = None,
        generation: int = 0,
    ) -> str:
        """Empty if done, else why not. point: of failpoints.py; generation: the number being written."""
        try:
            self._failpoints.reach(f"{point}.before", generation)
            succeeded = self._store.transact(compares, puts, deletes, timeout_s).succeeded
            self._failpoints.reach(f"{point}.after", generation)
            if succeeded:
                return ""
            reason = "a comparison failed"
        except InfrastructureLost as error:
            reason = str(error)
        if not quiet:
            self._report(WriteFailed(what, reason))
        return reason

    # -- probes

    def ask(self, question: Question, sequence: int) -> None:
        """Reports one direct answer and, if there is a relay, one relayed."""
        window_s = self._probe_window_s

        def direct() -> None:
            reply = probe(self._identity, question.control_address, question.agent_id, window_s)
            self._report(_result(question, sequence, False, reply))

        def relayed() -> None:
            reply = probe_through(
                self._identity, question.relay_address, question.control_address, question.agent_id, window_s
            )
            self._report(_result(question, sequence, True, reply))

        self._probers.submit(direct)
        if question.relay_agent_id:
            self._probers.submit(relayed)

    def _submit(self, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception:
                log.exception("a store operation of the leader failed in a way nobody foresaw")
                raise

        self._writer.submit(guarded)

    def stop(self) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._probers.shutdown(wait=True, cancel_futures=True)
