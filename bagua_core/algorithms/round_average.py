"""Averages what the workers' local steps of a round changed, weighted by their samples.

Owns the arithmetic of local SGD where the round is the unit of commit. The anchor is the model with which the round
began, alike on all members. At the end of a round each member sends the distance of its model from the anchor, and the
mean distance, by samples, is added to the anchor; an outer optimizer may take it as a gradient. The result is the new
anchor and every member's model. Invariants: anchor and momentum change in `step_committed` alone, by the same
operations on the same bits on every member; a member without samples contributes zero, whatever its model is.

Compressed, what a member could not send is its own error (feedback_sum.py), which it adds to its next distance. An
error belongs to one value of the clock: a member that copied the state of another begins without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from bagua_core.algorithms.algorithm import Attachment
from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.compressed.compression import WithFeedback
from bagua_core.communication.compressed.feedback_sum import feedback_sum, piece_size
from bagua_core.communication.devices.device_wait import last_awaited
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import operation_queue_of
from bagua_core.communication.reduction.trained_parameters import Candidates, check_known
from bagua_core.communication.weights.outer_step import OuterStep
from bagua_core.communication.weights.weight_buckets import FlatWeights


class RoundAverage(Exchange):
    """Averages the workers' distances from the anchor at the end of each round.

    outer: takes the mean distance as a gradient; None adds it as it is. form: in which distances travel; None: not
    compressed.
    """

    def __init__(self, attachment: Attachment, outer: OuterStep | None, form: WithFeedback | None) -> None:
        self._engine = attachment.engine
        self._operations = operation_queue_of(attachment.engine)
        self._parameters = attachment.parameters
        self._known = frozenset(map(id, attachment.parameters))
        self._outer = outer
        self._form = form
        self._anchor = FlatWeights(attachment.parameters, widen=True)
        self._momentum = [] if outer is None else self._anchor.like()
        # averages taken, and one; 0: there is no anchor yet
        self._clock = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._errors: list[torch.Tensor] = []  # of the averages so far, if _errors_clock is the clock
        self._errors_left: list[torch.Tensor] = []  # of the one under way
        self._errors_clock = 0
        self._distance = FlatWeights(attachment.parameters, widen=True)  # then the mean of all members'
        self._is_under_way = False  # a collective may still write into it
        self._has_mean = False

    def trains(self, candidates: Candidates, choice: bytes) -> None:
        check_known(candidates, choice, self._known)

    def forward_begins(self) -> None:
        # The job's first round: all models are alike. Not before, for a script may load one after wrapping it.
        self._set_anchor_once()

    def copy_begins(self) -> None:
        # beside the job's first round too; a copy must not read an anchor that was never filled
        self._set_anchor_once()

    def close_round(self, communicator: Communicator | None, weight: float) -> None:
        with torch.no_grad():
            self._set_anchor_once()
            self._distance.fill()
            distances = self._distance.flats
            if weight:
                torch._foreach_sub_(distances, self._anchor.flats)
                torch._foreach_mul_(distances, weight)
            else:
                torch._foreach_zero_(distances)
            if communicator is not None:
                self._is_under_way = True
                for pending in self._sum(communicator):
                    self._engine.wait(pending)
                self._is_under_way = False
            elif errors := self._own_errors():
                torch._foreach_add_(distances, errors)  # nothing is lost any more
        self._has_mean = True

    @contextmanager
    def at_round_begin(self) -> Iterator[None]:
        if not int(self._clock):  # no local step was taken, nor an average
            yield
            return
        # not the memory of the distance: a collective may be under way in it
        local = FlatWeights(self._parameters, widen=True)
        local.fill()
        self._anchor.write_back()
        try:
            yield
        finally:
            local.write_back()

    def step_committed(self) -> None:
        if not self._has_mean:
            return
        self._has_mean = False
        self._engine.parameters_change()
        self._clock.add_(1)
        self._errors, self._errors_left, self._errors_clock = self._errors_left, [], int(self._clock)
        with torch.no_grad():
            if self._outer is None:
                torch._foreach_add_(self._anchor.flats, self._distance.flats)
            else:
                torch._foreach_neg_(self._distance.flats)
                self._outer.take(self._anchor.flats, self._momentum, self._distance.flats, self._momentum)
                self._anchor.take(self._distance.flats)
            self._anchor.write_back()

    def step_rolled_back(self) -> None:
        if self._is_under_way:
            self._distance.renew()
        self._is_under_way = self._has_mean = False
        self._errors_left = []

    def state_replaced(self) -> None:
        self._errors = []

    def travelling(self) -> Mapping[str, torch.Tensor]:
        return {
            **{f"anchor.{i}": flat for i, flat in enumerate(self._anchor.flats)},
            **{f"momentum.{i}": flat for i, flat in enumerate(self._momentum)},
            "clock": self._clock,
        }

    def _set_anchor_once(self) -> None:
        if not int(self._clock):
            self._anchor.fill()
            self._clock.fill_(1)

    def _own_errors(self) -> list[torch.Tensor]:
        """Returns the errors of this worker's distances, as of the last average; empty if there are none."""
        return self._errors if self._errors_clock == int(self._clock) else []

    def _sum(self, communicator: Communicator) -> list[Pending]:
        """Begins the sum of all members' distances, in place; all get the same bits. Returns what is to be awaited.

        Compressed, a distance is cut into pieces: one is encoded or decoded while another travels. The last piece of a
        device ends after all others of it.
        """
        distances = self._distance.flats
        if self._form is None:
            return last_awaited([communicator.allreduce(flat) for flat in distances], distances)
        before = self._own_errors() or [torch.zeros_like(flat) for flat in distances]
        self._errors_left = [torch.empty_like(flat) for flat in distances]
        last: dict[torch.device, Pending] = {}
        for flat, *errors in zip(distances, before, self._errors_left, strict=True):
            size = piece_size(flat.numel(), communicator.world_size)
            for piece in zip(*(torch.split(whole, size) for whole in (flat, *errors)), strict=True):
                job = feedback_sum(communicator, self._form, *piece)
                last[flat.device] = self._operations.launch(communicator, job, piece)
        return list(last.values())
