"""Carries out the leader's decisions: election, writes that the leadership key fences, probes.

Owns the transactions that the leadership key fences. Runs store operations in one thread of its own, so that the
agent's loop never waits for etcd. Each operation ends in exactly one report, whatever it raises (background.py); what
a failure means is `ends_leading`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from bagua_agent.base.background import Background, Failed, OperationEnd
from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.base.failpoints import Failpoints
from bagua_agent.etcd.client import (
    MOST_OPERATIONS_IN_A_TRANSACTION,
    Compare,
    Put,
    Store,
    create_revision_is,
    mod_revision_is,
)
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.keys import JobKeys, Removal, check_id
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.large_jobs.record_parts import StoredRecord
from bagua_agent.leadership.reports import (
    Act,
    Elected,
    GenerationRefused,
    NotElected,
    ProbeFailed,
    ProbeResult,
    Report,
    Touched,
    WriteFailed,
    Written,
)
from bagua_agent.membership.actions import Question, ResultOutcome
from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.view import ProbeVerdict
from bagua_agent.rpc.control_client import probe, probe_through
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_agent.rpc.reachability import Reachability, reach_all
from bagua_contract import control_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_contract.replica import Replica

log = logging.getLogger(__name__)

# An agent that can't reach etcd for longer than this may itself be cut off: its report is stale by then.
REMOVAL_TIMEOUT_S = 1.0
MOST_PROBES_AT_ONCE = 16


def ends_leading(error: BaseException) -> bool:
    """Tells whether an agent whose write failed with `error` should give the leadership up; pure.

    An outage passes, and the lease decides who leads after it. A right that was withdrawn, a request that etcd refuses,
    or a bug fails each time: the key would stay, kept by the lease, and no decision of the job would be carried out.
    """
    return not isinstance(error, InfrastructureLost)


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
        """Prepares the operations. stored(record, addresses of agents): how a record is written."""
        self._stored = stored
        self._store = store
        self._keys = keys
        self._leased = leased
        self._identity = identity
        self._probe_window_s = probe_window_s
        self._report = report
        self._writer = Background("bagua-leader")
        self._probers = Background("bagua-probe", MOST_PROBES_AT_ONCE)
        self._toucher = Background("bagua-touch")  # apart: silence of many must not keep a probe waiting
        self._fence = 0
        self._failpoints = Failpoints.from_environment()

    # -- election

    def stand(self, agent_id: str, control_address: str) -> None:
        """Tries to become the leader. Reports Elected, NotElected or WriteFailed."""
        value = pb.Leader(agent_id=agent_id, control_address=control_address).SerializeToString()

        def elect() -> Report:
            self._failpoints.reach("election.before")
            revision = self._leased.put_if_absent(self._keys.leader, value)
            if revision is None:
                return NotElected()
            self._failpoints.reach("election.after")
            self._fence = revision
            return Elected(revision)

        self._write(Act.ELECTION, "standing for election", elect)

    def lost(self) -> None:
        """Notes that the key is not ours any more. Writes under way fail by themselves: they are fenced."""
        self._fence = 0

    def resign(self) -> None:
        """Removes our leadership key, so that another agent can lead. Returns at once."""
        self._fence = 0
        self._leased.remove(self._keys.leader)

    def remove_dead_leader(
        self, agent_id: str, create_revision: int, agent_revision: int, worker_ids: Sequence[str]
    ) -> None:
        """Removes the keys of a leader whose death was confirmed: its leadership and its part in the job, in one
        transaction. create_revision: of its leadership; agent_revision: of its agent key. If either has changed,
        nothing is removed. agent_revision 0: its leadership alone is removed; its other keys are not seen here.

        Keys of workers that exceed etcd's limit are removed in transactions after it, while no agent of its id is
        there.
        """
        act, what = Act.LEADER_REMOVAL, "removing a dead leader's keys"
        compares = [create_revision_is(self._keys.leader, create_revision)]
        deletes = [*self._keys.removed(Removal.WITH_LEADER)]
        own = self._keys.agent(agent_id)
        if agent_revision:
            compares.append(create_revision_is(own, agent_revision))
            deletes += [own, *self._keys_of_workers(worker_ids)]

        def remove() -> Report:
            size = MOST_OPERATIONS_IN_A_TRANSACTION
            for start in range(0, len(deletes), size):
                refused = self._transact(
                    act,
                    compares if not start else [create_revision_is(own, 0)],
                    deletes=deletes[start : start + size],
                    timeout_s=REMOVAL_TIMEOUT_S,
                )
                if refused:
                    return WriteFailed(act, what, refused)
            return Written(act)

        self._write(act, what, remove)

    def _keys_of_workers(self, worker_ids: Sequence[str]) -> list[str]:
        folders = self._keys.removed(Removal.WITH_AGENTS_WORKERS)
        return [folder + check_id("worker", w) for w in worker_ids for folder in folders]

    # -- fenced writes

    def write_generation(
        self,
        generation: Generation,
        previous_mod_revision: int,
        unended: Compare,
        addresses: Mapping[str, str],
    ) -> None:
        """Writes a generation. previous_mod_revision: of the current generation key; 0 if absent. unended: that the job
        has no result. addresses: of the agents' control services."""
        fence, number = self._fence, generation.number

        def write() -> Report:
            form = self._stored(generation, addresses)
            try:
                for part in form.parts:
                    self._store.put(part.key, part.value)  # not fenced: no agent reads a part without a head
                refused = self._transact(
                    Act.GENERATION,
                    [
                        create_revision_is(self._keys.leader, fence),
                        mod_revision_is(self._keys.generation, previous_mod_revision),
                        unended,
                    ],
                    puts=[Put(self._keys.generation, form.value)],
                    generation=number,
                )
            except InfrastructureLost as error:
                refused = str(error)
            if refused:
                return GenerationRefused(number, refused)
            if form.parts:
                self._remove_parts_before(number - 1)
            return Written(Act.GENERATION)

        self._write(Act.GENERATION, f"writing generation {number}", write)

    def _remove_parts_before(self, number: int) -> None:
        """Removes the parts of obsolete records. A part that could not be removed goes with the next."""
        first, end = (f"{self._keys.records}{n:020d}".encode() for n in (0, number))
        try:
            self._store.delete_range(KeyRange(first, end))
        except InfrastructureLost as error:
            log.info("records before generation %d stay for now: %s", number, error)

    def write_result(
        self,
        unended: Compare,
        outcome: ResultOutcome,
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
            Act.RESULT,
            "writing the result",
            [unended],
            puts=[Put(self._keys.result, result.SerializeToString())],
            deletes=self._keys.removed(Removal.WITH_RESULT),  # no agent joins any more
        )

    def refuse(self, worker_id: str, difference: str) -> None:
        refusal = pb.Refusal(worker_id=worker_id, difference=difference)
        self._fenced(
            Act.REFUSAL,
            f"refusing {worker_id}",
            puts=[Put(self._keys.refused(worker_id), refusal.SerializeToString())],
        )

    def write_hang_order(self, order: HangOrder | None) -> None:
        """Writes the hang order, or removes it. None: no worker is late any more."""
        if order is None:
            self._fenced(Act.HANG_ORDER, "removing the hang order", deletes=[self._keys.hang])
            return
        value = pb.HangOrder(
            generation=order.generation,
            outcome=order.outcome.name,
            workers=order.workers,
            reason=order.reason,
        )
        self._fenced(
            Act.HANG_ORDER,
            "writing the hang order",
            puts=[Put(self._keys.hang, value.SerializeToString())],
        )

    def write_replicas(self, replicas: Sequence[Replica], forgotten: Sequence[str]) -> None:
        self._fenced(
            Act.REPLICAS,
            "writing replicas",
            puts=[Put(self._keys.replica(r.replica_id), r.encode()) for r in replicas],
            deletes=[self._keys.replica(replica_id) for replica_id in forgotten],
        )

    def write_study(self, value: bytes) -> None:
        """Writes what the tuner tries now."""
        self._fenced(Act.STUDY, "writing the study", puts=[Put(self._keys.study, value)])

    def remove_agent(self, agent_id: str, join_revision: int, worker_ids: list[str]) -> None:
        """Removes a dead agent's keys, if its key is still the one that was confirmed dead."""
        own = self._keys.agent(agent_id)
        # The agent's own key goes last: while it exists, the next leader finds the agent dead and removes the rest.
        deletes = [*self._keys_of_workers(worker_ids), own]
        self._fenced(
            Act.AGENT_REMOVAL,
            f"removing the dead agent {agent_id}",
            [create_revision_is(own, join_revision)],
            deletes=deletes,
        )

    def _fenced(
        self,
        act: Act,
        what: str,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> None:
        """Writes in one transaction; of more deletes than etcd takes in one, the first ones go in transactions before
        it."""
        fenced = [create_revision_is(self._keys.leader, self._fence), *compares]
        most = MOST_OPERATIONS_IN_A_TRANSACTION - len(puts)

        def write() -> Report:
            left = list(deletes)
            while len(left) > most:
                chunk, left = left[:MOST_OPERATIONS_IN_A_TRANSACTION], left[MOST_OPERATIONS_IN_A_TRANSACTION:]
                if refused := self._transact(act, fenced, deletes=chunk):
                    return WriteFailed(act, what, refused)
            if refused := self._transact(act, fenced, puts, left):
                return WriteFailed(act, what, refused)
            return Written(act)

        self._write(act, what, write)

    def _transact(
        self,
        act: Act,
        compares: Sequence[Compare],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        generation: int = 0,
    ) -> str:
        """Does one transaction. Returns an empty string if it was done, else which comparison failed. Raises what the
        store raises.

        act: names the failpoints. generation: the number being written.
        """
        self._failpoints.reach(f"{act.value}.before", generation)
        succeeded = self._store.transact(compares, puts, deletes, timeout_s).succeeded
        self._failpoints.reach(f"{act.value}.after", generation)
        return "" if succeeded else "a comparison failed"

    def _write(self, act: Act, what: str, operation: Callable[[], Report]) -> None:
        def ended(end: OperationEnd[Report]) -> None:
            if isinstance(end, Failed):
                self._report(WriteFailed(act, what, end.reason, ends_leading(end.error)))
            else:
                self._report(end.value)

        self._writer.run(what, operation, ended)

    # -- probes

    def ask(self, question: Question, sequence: int) -> None:
        """Asks an agent whether it lives. Reports one direct answer and, if there is a relay, one relayed; ProbeFailed
        if it could not be asked."""
        window_s = self._probe_window_s

        def ask_one(relayed: bool, asked: Callable[[], control_pb2.ProbeReply]) -> None:
            def ended(end: OperationEnd[control_pb2.ProbeReply]) -> None:
                if isinstance(end, Failed):
                    self._report(ProbeFailed(question.agent_id, end.reason))
                else:
                    self._report(_result(question, sequence, relayed, end.value))

            self._probers.run(f"asking agent {question.agent_id}", asked, ended)

        ask_one(False, lambda: probe(self._identity, question.control_address, question.agent_id, window_s))
        if question.relay_agent_id:
            ask_one(
                True,
                lambda: probe_through(
                    self._identity,
                    question.relay_address,
                    question.control_address,
                    question.agent_id,
                    window_s,
                ),
            )

    def touch(self, addresses: Mapping[str, str]) -> None:
        """Touches agents and reports Touched. addresses: agent -> control address."""

        def ended(end: OperationEnd[dict[str, Reachability]]) -> None:
            self._report(Touched({} if isinstance(end, Failed) else end.value))

        window_s = self._probe_window_s
        self._toucher.run("touching agents", lambda: reach_all(addresses, window_s), ended)

    def stop(self) -> None:
        self._toucher.stop()
        self._writer.stop()
        self._probers.stop()


def _result(question: Question, sequence: int, relayed: bool, reply: control_pb2.ProbeReply) -> ProbeResult:
    verdict = ProbeVerdict(reply.verdict)
    workers = tuple(reply.workers) if verdict is ProbeVerdict.ALIVE else None
    return ProbeResult(question.agent_id, sequence, relayed, verdict, workers)
