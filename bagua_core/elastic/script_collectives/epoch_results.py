"""Gives a joiner the results of the collectives with which the members began the epoch that it joins.

A script may call collectives at the top of its loop over `loader.epochs()`. Each member keeps their results, and
publishes them at the boundary before the epoch's first step. A joiner comes to the same calls before its own first
step, in which it can have no peers. It is answered from a member's results, and waits for them where the members are
still in front of that step.

Runs in the script's thread. Invariant: what a member publishes of an epoch is complete.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted
from bagua_core.communication.transports.meeting_store import MeetingStoreError
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.script_collectives.kept_results import (
    ANSWER_WITHIN_S,
    Answer,
    KeptResults,
    fetch,
    is_answerable,
    store_at,
)
from bagua_core.elastic.script_collectives.requests import Request, Result
from bagua_core.elastic.state.state_codec import StateCodecError

_RECIPE = (
    "Every worker must make the same calls between `for epoch in loader.epochs(...)` and the epoch's first batch. "
    "Otherwise call it in the loop over the batches, or compute the value from what every worker has"
)


class EpochResults:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._epoch: int | None = None  # between epochs() and the boundary before the epoch's first step
        self._kept = KeptResults()
        self._is_fetched = False
        self._next = 0  # of a joiner: the first result that it has not used
        self._published: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the script is between `epochs()` and the epoch's first batch."""
        return self._epoch is not None

    def begins(self, epoch: int) -> None:
        """Notes that the loader yields `epoch` to the script."""
        self.ends()  # also where the script has left the loop over epochs
        self._epoch, self._kept, self._is_fetched, self._next = epoch, KeptResults(), False, 0

    def ends(self) -> None:
        """Withdraws the results, since the script has left the epoch's loop: an epoch whose loop is left early comes
        again, and its calls have other results then. Called before the boundary at which workers may join."""
        if self._published:
            self._member.rendezvous.publish(dict.fromkeys(self._published, b""))
            self._published = ()

    def completed(self, request: Request, result: Result) -> None:
        """Keeps the result of a collective that this worker has done with the others."""
        if self.is_open and is_answerable(request):
            self._kept.add(request, request.root, result)

    def boundary(self, is_alone: bool) -> None:
        """Publishes the results, which are complete now. A joiner (is_alone) publishes those that it was given, or that
        it has none."""
        if self._epoch is None:
            return
        if self._is_fetched and (left := len(self._kept.answers) - self._next):
            self._warn(
                f"{left} of the others' results were not asked for, so an earlier call may have another's"
            )
        prefix = self._prefix(self._epoch)
        knows = self._is_fetched or not is_alone
        values = self._kept.values(prefix) if knows else {f"{prefix}/parts": b"0"}
        self._member.rendezvous.publish(values)
        self._published = tuple(values)
        self._epoch, self._kept = None, KeptResults()

    def answer(self, request: Request, addresses: Sequence[str], abort_flag: AbortFlag) -> Result | None:
        """Returns the members' result of a joiner's request; None if there is none. Of a broadcast that is a warning.

        addresses: of the meeting stores of the members that have the state. abort_flag: of the generation.
        Raises CollectiveAborted.
        """
        if not is_answerable(request):
            return None
        if not self._is_fetched:
            self._kept, self._is_fetched = self._fetch(request, addresses, abort_flag), True
        asked = request.asked_of_all_shards(request.root)
        answers = self._kept.answers
        found = next((i for i in range(self._next, len(answers)) if answers[i].asked == asked), None)
        known = Answer(asked, None, "the members did not call it there") if found is None else answers[found]
        if found is not None:
            self._next = found + 1
        if known.result is not None:
            return [known.result.to(request.tensor.device, copy=True)]
        if request.comes_from_root:
            self._warn(f"{asked} returns this worker's own value, since {known.why}")
        return None

    def _warn(self, what: str) -> None:
        """Prints a warning. An error would be a failure of the script, which may end the job."""
        print(
            f"bagua: warning: a joiner's calls before its first step, in epoch {self._epoch}: {what}. {_RECIPE}",
            file=sys.stderr,
            flush=True,
        )

    def _fetch(self, request: Request, addresses: Sequence[str], abort_flag: AbortFlag) -> KeptResults:
        """Returns the results of the epoch, from the first member that has them. Waits until one has. Returns none if
        all members say that they have none. Raises CollectiveAborted."""
        assert self._epoch is not None
        ended = threading.Event()
        abort_flag.add_waiter(ended.set)
        waits_said = False
        while True:
            began_s, have_none = time.monotonic(), 0
            for address in addresses:
                if ended.is_set():
                    raise CollectiveAborted("the generation ended before its members began the epoch")
                try:
                    return self._fetch_from(address, self._epoch)
                except MeetingStoreError:
                    continue  # not yet, or it is lost
                except (StateCodecError, ValueError):
                    have_none += 1
            if have_none == len(addresses):
                return KeptResults()  # they joined in this epoch too, and asked for none
            if not waits_said:
                waits_said = True
                print(
                    f"bagua: a joiner waits in {request.asked(request.root)} until the other workers begin the first "
                    f"step of epoch {self._epoch}",
                    file=sys.stderr,
                    flush=True,
                )
            # members that answer at once must not be asked again at once
            ended.wait(max(0.1, began_s + ANSWER_WITHIN_S - time.monotonic()))

    def _fetch_from(self, address: str, epoch: int) -> KeptResults:
        store = store_at(address)
        try:
            return fetch(store, self._prefix(epoch))
        finally:
            store.close()

    def _prefix(self, epoch: int) -> str:
        return f"{self._member.session.news.nonce}/epoch-{epoch}"
