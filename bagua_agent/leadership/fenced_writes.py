"""Carries out the leader's decisions: transactions that are refused once another agent leads.

Each compares the create revision of the leadership key, which is the fence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.etcd.client import (
    MOST_OPERATIONS_IN_A_TRANSACTION,
    Compare,
    Put,
    Store,
    create_revision_is,
    mod_revision_is,
)
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.keys import JobKeys, Removal
from bagua_agent.large_jobs.record_parts import StoredRecord
from bagua_agent.leadership.leader_writes import LeaderWrites, keys_of_workers
from bagua_agent.leadership.reports import Act, GenerationRefused, Report, WriteFailed, Written
from bagua_agent.membership.actions import ResultOutcome
from bagua_agent.membership.hang import HangOrder
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_contract.replica import Replica

log = logging.getLogger(__name__)


class FencedWrites:
    """The leader's writes. stored(record, addresses of agents): how a record is written."""

    def __init__(
        self,
        writes: LeaderWrites,
        store: Store,
        keys: JobKeys,
        stored: Callable[[Generation, Mapping[str, str]], StoredRecord],
    ) -> None:
        self._writes = writes
        self._store = store
        self._keys = keys
        self._stored = stored

    def write_generation(
        self,
        generation: Generation,
        previous_mod_revision: int,
        unended: Compare,
        addresses: Mapping[str, str],
    ) -> None:
        """Writes a generation. previous_mod_revision: of the current generation key; 0 if absent. unended: that the job
        has no result. addresses: of the agents' control services."""
        fence, number = self._writes.fence, generation.number

        def write() -> Report:
            form = self._stored(generation, addresses)
            try:
                for part in form.parts:
                    self._store.put(part.key, part.value)  # not fenced: no agent reads a part without a head
                refused = self._writes.transact(
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

        self._writes.run(Act.GENERATION, f"writing generation {number}", write)

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
        deletes = [*keys_of_workers(self._keys, worker_ids), own]
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
        fenced = [create_revision_is(self._keys.leader, self._writes.fence), *compares]
        most = MOST_OPERATIONS_IN_A_TRANSACTION - len(puts)

        def write() -> Report:
            left = list(deletes)
            while len(left) > most:
                chunk, left = left[:MOST_OPERATIONS_IN_A_TRANSACTION], left[MOST_OPERATIONS_IN_A_TRANSACTION:]
                if refused := self._writes.transact(act, fenced, deletes=chunk):
                    return WriteFailed(act, what, refused)
            if refused := self._writes.transact(act, fenced, puts, left):
                return WriteFailed(act, what, refused)
            return Written(act)

        self._writes.run(act, what, write)
