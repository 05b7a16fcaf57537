"""Answers a script that asks for ranks or collectives before its loop.

The job's first workers gather (`membership/formation/gathering.py` of the agent): their ranks are real, and their
collectives run among all of them. The result of each is kept. A worker that comes while the job trains takes no part in
them any more: a member hands it the results, and the same calls of its script are answered from these. Before its first
step boundary it has the rank after the last one, in a world of one more, so it is never rank 0.

Runs in the script's thread. Knows nothing of steps. From the first step boundary on nothing here is used any more.
"""

from __future__ import annotations

import random

from bagua_contract.records import Generation
from bagua_core.communication.transports.meeting_store import MeetingStoreError
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.script_collectives.kept_results import KeptResults, fetch, store_at
from bagua_core.elastic.script_collectives.requests import Request, Result
from bagua_core.elastic.state.state_codec import StateCodecError
from bagua_core.elastic.waiting.operations import MismatchedCollective
from bagua_core.errors import LateWorkerError

MEMBERS_ASKED = 4  # in one attempt; each may be on a host that does not answer
_RECIPE = (
    "compute it from what every worker has, ask for it inside the loop, or let rank 0 share it with "
    "broadcast_object(), whose results are kept for workers that come later"
)


class BeforeLoop:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._kept = KeptResults()
        self._next = 0  # of a late worker: the answer to its next collective
        self._late_place: tuple[int, int] | None = None
        self._asked = False
        self._loop_began = False

    @property
    def is_late(self) -> bool:
        """Whether this worker came while the job trains, and is not at its first step boundary yet."""
        return self._late_place is not None and not self._loop_began

    def join(self) -> None:
        """Joins the job, so that this worker has ranks from now on. Does nothing from the second call on, and once the
        loop has begun. SystemExit or LeaveInterrupt when this worker is to end instead."""
        if self._asked or self._loop_began:
            return
        self._asked = True
        if self._member.gather(self._trains):
            self._late_place, self._kept = None, KeptResults()

    def place(self) -> tuple[int, int] | None:
        """Returns (rank, world size) of a worker that comes later; None for all others."""
        return self._late_place if self.is_late else None

    def boundary(self) -> None:
        """Publishes the results at the first step boundary: they are complete, and later workers can have them."""
        if not self._loop_began:
            self._loop_began = True
            self._publish()

    # -- one of the first workers

    def completed(self, request: Request, root: int | None, result: Result) -> None:
        """Keeps the result of a collective that all first workers have done."""
        self._kept.add(request, root, result)

    # -- one that comes later

    def answer(self, request: Request) -> Result:
        """Returns what the first workers got. Raises MismatchedCollective, LateWorkerError."""
        asked = request.asked_of_all_shards(request.root)
        answers = self._kept.answers
        if self._next >= len(answers) and self._kept.is_full:
            raise LateWorkerError(
                f"this worker came while the job trains, and no more than {len(answers)} results of collectives before "
                f"the loop are kept, so it has none of {asked}. Instead {_RECIPE}"
            )
        known = answers[self._next] if self._next < len(answers) else None
        if known is None or known.asked != asked:
            did = f"{known.asked} there" if known is not None else "nothing more"
            raise MismatchedCollective(
                f"this worker came while the job trains and asks for {asked} before its first step, where the job's "
                f"first workers asked for {did}. Every worker must call the same collectives in the same order"
            )
        self._next += 1
        if known.result is None:
            raise LateWorkerError(
                f"this worker came while the job trains, so it has no part in {asked} before the loop: {known.why}. "
                f"Instead {_RECIPE}"
            )
        return [known.result.clone()]

    def refuse(self, what: str) -> LateWorkerError:
        """Returns the error for `what`, something that a late worker can't do."""
        return LateWorkerError(
            f"{what}: this worker came while the job trains and is before its first step, so it has no peers. "
            f"Instead {_RECIPE}"
        )

    # -- from the first to the later ones

    def _publish(self) -> None:
        nonce = self._member.session.news.nonce
        self._member.rendezvous.publish(self._kept.values(_prefix(nonce)))

    def _trains(self, record: Generation) -> bool:
        """Tells whether a member of `record` is there, or one that waits if all have stepped aside; it gives the
        results."""
        addresses = [m.store_address for m in record.members] or list(record.answers_at)
        for address in random.sample(addresses, min(MEMBERS_ASKED, len(addresses))):
            try:
                store = store_at(address)
            except (MeetingStoreError, ValueError):
                continue
            try:
                self._kept = fetch(store, _prefix(record.nonce))
            except (MeetingStoreError, StateCodecError, ValueError):
                continue
            finally:
                store.close()
            shard_rank, size = (0, 1) if self._member.replica is None else self._member.replica.place
            self._late_place = (len(addresses) + shard_rank, len(addresses) + size)
            return True
        return False


def _prefix(nonce: str) -> str:
    return f"{nonce}/before-loop"
