"""Runs this worker's part in copies of the state: the copies at once, and the copy beside the first step.

Owns the transfer under way and where it lands. Who copies from whom and in which order is heal_plan.py's decision; the
wire is heal.py's. A copy has two parts: the bulk, striped over the sources, and the rest, from the first of them. For
a copy beside a step the bulk is read from the begin of the step on, and the rest when the step's first reduction is
in: the receiver puts both in at the same place of its own script, so that it has what the script did until there.
Invariant: once a transfer is dropped nothing of it is written into the live state any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Communicator
from bagua_core.communication.devices.device_order import Handover
from bagua_core.elastic.heal import heal
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.heal.received_state import Fitting, InPlace, ReceivedState, Staging
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.state import heal_memory
from bagua_core.elastic.state.committed_state import CommittedState, Remains


class LateValue:
    """A value that the script's thread gives to a sending thread, or gives up. Used once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: Any = None
        self._given: Handover | None = None  # what the script's stream had been given by then
        self.is_given = False
        self._is_given_up = False

    def give(self, value: Any) -> None:
        with self._changed:
            self._value, self._given, self.is_given = value, Handover(), True
            self._changed.notify_all()

    def give_up(self) -> None:
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    @contextmanager
    def taken(self) -> Iterator[Any]:
        """Waits for the value; the step that gives it, or its end, comes first. Device work within comes after what
        made the value. Raises CollectiveAborted."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_given or self._is_given_up)
            if self._given is None:
                raise CollectiveAborted("the copy was given up")
        with self._given.taken_over():
            yield self._value


class Copying:
    """Runs the copies of the state in which this worker takes part. swap_in makes a copied state this worker's. reach
    reaches a failpoint. say prints a line for the user."""

    def __init__(
        self,
        state: CommittedState,
        member: Member,
        swap_in: Callable[[Any], None],
        reach: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """Reads the limit of the memory for staging from the environment. Raises StagingLimitError."""
        self._state = state
        self._member = member
        self._swap_in = swap_in
        self._reach = reach
        self._say = say
        self._limit_bytes = heal_memory.limit_bytes_from(os.environ)
        self._staging_failed = False
        self._stages = True
        self._transfer: heal.Transfer | None = None
        self._memory: ReceivedState | None = None
        self._beside: tuple[Communicator, HealPlan] | None = None  # a copy that the first step begins
        self._rest: LateValue | None = None  # of the copy beside the step, on its first source

    # -- entering a generation

    def stages(self) -> bool:
        """Tells whether a copy would leave this worker's own state alone until it is verified. The other members plan
        with the answer."""
        if self._state.name.is_none:
            self._stages = True  # there is nothing to leave alone
        else:
            self._stages = not self._staging_failed and self._fits(self._state.size_bytes)
        return self._stages

    def enter(self, communicator: Communicator, plan: HealPlan) -> None:
        """Copies at once as planned, and begins to receive the copy beside the first step. Raises CollectiveFailed.

        The shards of a replica swap their copies in together or not at all: with one of two, the replica would count by
        its older shard as a holder of a state that the newer one has no more.
        """
        self.drop()
        own = communicator.global_rank
        is_source = own in plan.sources
        if plan.replaying:
            with self._member.jointly():
                missed = self._replayed(communicator, plan)
            if missed is not None:
                self._swap_in(missed)
        bulk, rest = None, None
        if is_source and plan.rounds:
            bulk = self._state.bulk(with_gradients=True)
            if own == plan.sources[0]:
                rest = LateValue()
                rest.give(self._state.rest(at_resume_point=self._state.resume_point_is_current))
        for number, receivers in enumerate(plan.rounds):
            copied: dict[str, Any] | None = None
            with self._member.jointly():
                if number:  # everyone takes part, so the copies of the round before are verified
                    self._member.wait_unlearned(
                        communicator.allreduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
                    )
                if is_source:
                    self._await(self._sending(communicator, bulk, rest, plan, receivers))
                elif own in receivers:
                    self._transfer = self._receiving(communicator, plan)
                    copied = self._received()
            if copied is not None:
                self._swap_in(copied)
        self._beside = (communicator, plan) if plan.newcomers else None
        if own in plan.newcomers:
            self._transfer = self._receiving(communicator, plan)

    def step_begins(self) -> None:
        """Begins to send joiners what this step builds on: the script is in the first step of a generation that they
        joined.

        Not before: between two steps a script may change what it likes.
        """
        if self._beside is None:
            return
        (communicator, plan), self._beside = self._beside, None
        if communicator.global_rank in plan.sources:
            if communicator.global_rank == plan.sources[0]:
                self._rest = LateValue()
            bulk = self._state.bulk(with_gradients=False)
            self._transfer = self._sending(communicator, bulk, self._rest, plan, plan.newcomers)

    def reduced(self, *, with_gradients: bool = False) -> None:
        """Sends the rest of the state as it is now, if this worker is its source.

        The first reduction of the step is in, here and on the workers that joined. with_gradients: an optimizer comes
        before that, so what .grad holds is sent too.
        """
        if self._rest is not None and not self._rest.is_given:
            self._rest.give(self._state.rest(at_resume_point=False, with_gradients=with_gradients))

    def _replayed(self, communicator: Communicator, plan: HealPlan) -> Any:
        """Gives those that have every step the results of collectives that they missed. Returns what this worker gets;
        None if it misses none."""
        own, holder = communicator.global_rank, plan.sources[0]
        if own == holder:
            log = self._state.log()
            receivers = sorted(plan.replaying)
            self._await(
                heal.Transfer(
                    lambda: heal.send_state(communicator, log, [holder], receivers), self._member.changed
                )
            )
        elif own in plan.replaying:
            transfer = heal.Transfer(lambda: heal.receive_state(communicator, [holder]), self._member.changed)
            self._await(transfer)
            return transfer.result
        return None

    def _sending(
        self,
        communicator: Communicator,
        bulk: Any,
        rest: LateValue | None,
        plan: HealPlan,
        receivers: frozenset[int],
    ) -> heal.Transfer:
        """rest: of the first source; None on the others."""

        def send() -> None:
            self._reach("heal.send")
            heal.send_state(communicator, bulk, plan.sources, sorted(receivers))
            if rest is not None:
                with rest.taken() as value:
                    heal.send_state(communicator, value, plan.sources[:1], sorted(receivers))

        return heal.Transfer(send, self._member.changed)

    def _receiving(self, communicator: Communicator, plan: HealPlan) -> heal.Transfer:
        received = self._memory = self._choose_memory(plan)

        def receive() -> Any:
            try:
                bulk = heal.receive_state(communicator, plan.sources, received)
            except (MemoryError, RuntimeError) as error:
                if not (isinstance(received, Staging) and heal_memory.is_out_of_memory(error)):
                    raise
                # The others rely on the state that is here: tell them first, by entering anew.
                self._staging_failed = True
                raise CollectiveFailed(f"there is no memory for a copy beside the state: {error}") from error
            return {"bulk": bulk, **heal.receive_state(communicator, plan.sources[:1])}

        transfer = heal.Transfer(receive, self._member.changed)
        self._reach("heal.receive")
        return transfer

    def _choose_memory(self, plan: HealPlan) -> ReceivedState:
        in_place = InPlace(
            lambda: self._state.bulk(with_gradients=False),
            lambda: self._declare_stateless(plan),
            self._state.guard.held,
        )
        if self._state.name.is_none:
            return Fitting(self._fits, in_place)
        return Staging() if self._stages else in_place

    def _declare_stateless(self, plan: HealPlan) -> None:
        self._state.declare_stateless(Remains.HALF_INITIAL if plan.initial else Remains.HALF_COMMITTED)
        self._say(
            "no memory for a copy beside the live state: it is copied in place, and until that is verified this "
            "worker counts as having none"
        )

    def _fits(self, needed_bytes: int) -> bool:
        return heal_memory.decide(needed_bytes, heal_memory.available_bytes(), self._limit_bytes).stages

    # -- the transfer under way

    def drop(self) -> None:
        """Gives up the transfer under way, which belongs to a step or a generation that is over."""
        if self._memory is not None:
            self._memory.give_up()
        if self._rest is not None:
            self._rest.give_up()
        self._transfer = self._memory = self._beside = self._rest = None

    @property
    def is_under_way(self) -> bool:
        return self._transfer is not None

    def swap_in(self) -> None:
        """Waits for the copy that this worker receives and makes it its state. Raises CollectiveFailed."""
        self._swap_in(self._received())

    def _received(self) -> Any:
        """Waits for the copy that this worker receives, and returns it once it is verified. Raises CollectiveFailed."""
        transfer = self._transfer
        assert transfer is not None
        try:
            self._await(transfer)
            return transfer.result
        finally:
            self.drop()

    def finish(self, is_newcomer: bool) -> None:
        """Does what would have run beside the next step, since no further step comes. Raises CollectiveFailed."""
        if is_newcomer and self.is_under_way:
            self.swap_in()
        else:
            self.step_begins()
            self.reduced()
            self.sent()

    def sent(self) -> None:
        """Waits until copies that others receive no longer read the live state. Raises CollectiveFailed."""
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
