"""Copies of the state as this worker takes part in them: those at once, and the one beside the first step.

Owns the transfer under way, where it lands, and who is new in the generation. Who copies from whom and in which order
is heal_plan.py's decision; the wire is heal.py's. Invariant: once a transfer is dropped nothing of it is written into
the live state any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.elastic import heal, heal_memory
from bagua_core.elastic.committed_state import CommittedState
from bagua_core.elastic.heal_plan import HalfCopy, HealPlan
from bagua_core.elastic.landing import Fitting, InPlace, Landing, Staging
from bagua_core.elastic.member import Member


class Copying:
    """swap_in: makes a copied state this worker's. reach: of a failpoint. say: a line for the user."""

    def __init__(
        self,
        state: CommittedState,
        member: Member,
        swap_in: Callable[[Any], None],
        reach: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """Raises StagingLimitError."""
        self._state = state
        self._member = member
        self._swap_in = swap_in
        self._reach = reach
        self._say = say
        self._limit_bytes = heal_memory.limit_bytes_from(os.environ)
        self._staging_failed = False
        self._stages = True
        self._transfer: heal.Transfer | None = None
        self._landing: Landing | None = None

    # -- entering a generation

    def stages(self) -> bool:
        """Whether a copy would leave this worker's own state alone until it is verified: what the others plan with."""
        if self._state.name.is_none:
            self._stages = True  # there is nothing to leave alone
        else:
            self._stages = not self._staging_failed and self._fits(self._state.size_bytes)
        return self._stages

    def enter(self, communicator: Communicator, plan: HealPlan) -> None:
        """Copy at once as planned, and begin the copy beside the first step. Raises CollectiveFailed."""
        self.drop()
        own = communicator.global_rank
        is_source = own in plan.sources
        state = self._state.capture() if is_source and plan.healing else None
        if own in plan.beside:
            self._transfer = self._receiving(communicator, plan)
        for number, receivers in enumerate(plan.rounds):
            if number:  # everyone takes part, so the copies of the round before are verified
                self._member.wait_unlearned(communicator.allreduce(torch.zeros(1)))
            if is_source:
                self._await(self._sending(communicator, state, plan, receivers))
            elif own in receivers:
                self._transfer = self._receiving(communicator, plan)
                self.swap_in()
        if is_source and plan.beside:
            self._transfer = self._sending(communicator, state, plan, plan.beside)

    def _sending(
        self, communicator: Communicator, state: Any, plan: HealPlan, receivers: frozenset[int]
    ) -> heal.Transfer:
        def send() -> None:
            self._reach("heal.send")
            heal.send_state(communicator, state, plan.sources, sorted(receivers))

        return heal.Transfer(send, self._member.changed)

    def _receiving(self, communicator: Communicator, plan: HealPlan) -> heal.Transfer:
        landing = self._landing = self._choose_landing(plan)

        def receive() -> Any:
            try:
                return heal.receive_state(communicator, plan.sources, landing)
            except (MemoryError, RuntimeError) as error:
                if not (isinstance(landing, Staging) and heal_memory.is_out_of_memory(error)):
                    raise
                # The others rely on the state that is here: tell them first, by entering anew.
                self._staging_failed = True
                raise CollectiveFailed(f"there is no memory for a copy beside the state: {error}") from error

        transfer = heal.Transfer(receive, self._member.changed)
        self._reach("heal.receive")
        return transfer

    def _choose_landing(self, plan: HealPlan) -> Landing:
        in_place = InPlace(self._state.live, lambda: self._declare_stateless(plan))
        if self._state.name.is_none:
            return Fitting(self._fits, in_place)
        return Staging() if self._stages else in_place

    def _declare_stateless(self, plan: HealPlan) -> None:
        self._state.declare_stateless(HalfCopy.INITIAL if plan.initial else HalfCopy.COMMITTED)
        self._say(
            "no memory for a copy beside the live state: it is copied in place, and until that is verified this "
            "worker counts as having none"
        )

    def _fits(self, needed_bytes: int) -> bool:
        return heal_memory.decide(needed_bytes, heal_memory.available_bytes(), self._limit_bytes).stages

    # -- the transfer under way

    def drop(self) -> None:
        """Whatever is under way belongs to a step or a generation that is over."""
        if self._landing is not None:
            self._landing.give_up()
        self._transfer = self._landing = None

    @property
    def is_under_way(self) -> bool:
        return self._transfer is not None

    def swap_in(self) -> None:
        """Wait for the copy that this worker receives and make it its state. Raises CollectiveFailed."""
        transfer = self._transfer
        assert transfer is not None
        try:
            self._await(transfer)
            self._swap_in(transfer.result)
        finally:
            self.drop()

    def sent(self) -> None:
        """Wait until copies that others receive no longer read the live state. Raises CollectiveFailed."""
        transfer = self._transfer
        if transfer is None:
            return
        try:
            self._await(transfer)
        finally:
            self.drop()

    def _await(self, transfer: heal.Transfer) -> None:
        self._member.wait_for_transfer(lambda: transfer.done)
        if transfer.error is not None:
            raise transfer.error  # if it is no peer's doing, making the generation anew would not help
