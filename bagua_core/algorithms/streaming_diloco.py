"""Implements Streaming DiLoCo: workers train on their own; the model's fragments are averaged in turn, beside the
steps.

Owns the moments at which fragments are sent and applied. The rules, states and failures are in
docs/design/streaming-diloco.md; the algorithm is that of arXiv 2501.18512.

Everything that touches parameters runs in the script's thread at the start of a step's first forward. What is applied
there is provisional until the step's vote, as in local_sgd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.local_sgd import ROUND, STEP
from bagua_core.communication.communicator import Communicator, Lane
from bagua_core.communication.compressed.feedback_sum import COMPRESSIONS, form_of
from bagua_core.communication.compressed.fragment_mean import Feedback, weighted_mean
from bagua_core.communication.pending import DonePending
from bagua_core.communication.step_interface import StepPlan
from bagua_core.communication.weights.background_exchange import BackgroundExchange
from bagua_core.communication.weights.fragment import Flight, Fragment, OwnState
from bagua_core.communication.weights.fragment_schedule import Action, Schedule, cut
from bagua_core.communication.weights.outer_step import OUTER_LR, OUTER_MOMENTUM, OuterStep
from bagua_core.communication.weights.weight_buckets import check_compressible
from bagua_core.communication.weights.weight_exchange import WeightExchange

# The paper's rounds, and its mixing factor, which served delays of 1 to 5 steps.
DEFAULT_SYNC_EVERY = 100
DEFAULT_FRAGMENTS = 4
DEFAULT_DELAY = 5
DEFAULT_ALPHA = 0.5
WORKERS, SAMPLES = "workers", "samples"


class StreamingDiLoCo(Algorithm):
    """Exchanges each fragment of the model every `sync_every` steps, beside the steps, in its turn.

    sync_every: steps between two exchanges of a fragment.
    fragments: how many the model is cut into, of whole tensors; fewer where it has fewer tensors.
    delay: steps from an exchange's beginning to its use, less than sync_every; 0: it is awaited at once.
    alpha: what a worker keeps of its own weights when it takes the common ones, from 0 to below 1.
    outer_lr, outer_momentum: of Nesterov's step on what a round has changed.
    compress: "uint8" and "int4" send that in 8 and in about 4 bits a weight, with error feedback; "none" as it is.
    weighted_by: "workers" (each that used samples in the round counts the same) or "samples" (by the share of the
    batches that it used).
    unit: "step" is the only one (docs/design/rounds.md says why).
    Raises ValueError; `attach` does for parameters that can't be compressed.

    Commits: a step is final when all members have computed it; one that applies an exchange, when all have applied it.
    Heals: a joiner copies one holder's model and optimizer, and anchors, momentum and clocks. A change of membership
    drops the exchanges under way, which are repeated. Exactly once: every sample is computed and counted once; what a
    worker learned since its last exchange goes with it when it is lost.
    """

    name = "streaming_diloco"
    equal_states = False

    def __init__(
        self,
        sync_every: int = DEFAULT_SYNC_EVERY,
        fragments: int = DEFAULT_FRAGMENTS,
        delay: int = DEFAULT_DELAY,
        alpha: float = DEFAULT_ALPHA,
        outer_lr: float = OUTER_LR,
        outer_momentum: float = OUTER_MOMENTUM,
        compress: str = "none",
        weighted_by: str = WORKERS,
        unit: str = STEP,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every}; use 1 or more steps")
        if fragments < 1:
            raise ValueError(f"fragments={fragments}; use 1 or more")
        if not 0 <= delay < sync_every:
            raise ValueError(
                f"delay={delay}; use 0 to {sync_every - 1} steps, fewer than sync_every={sync_every}"
            )
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha={alpha} must be at least 0 and below 1")
        if compress not in COMPRESSIONS:
            raise ValueError(f"compress={compress!r} is unknown; use one of {', '.join(COMPRESSIONS)}")
        if weighted_by not in (WORKERS, SAMPLES):
            raise ValueError(f'weighted_by={weighted_by!r} is unknown; use "{WORKERS}" or "{SAMPLES}"')
        if unit != STEP:
            raise ValueError(
                f"unit={unit!r}: fragments are sent and applied in steps that all workers count alike, which a round "
                f'does not have; leave unit out, or use LocalSGD(unit="{ROUND}")'
            )
        self.sync_every = sync_every
        self.fragments = fragments
        self.delay = delay
        self.alpha = alpha
        self.outer = OuterStep(outer_lr, outer_momentum)
        self.compress = compress
        self.weighted_by = weighted_by

    @property
    def lanes(self) -> frozenset[Lane]:
        return frozenset({Lane.BACKGROUND})

    @property
    def described(self) -> str:
        return (
            f"{self.name}(every {self.sync_every}, {self.fragments} fragments, delay {self.delay}, "
            f"alpha {self.alpha:g}, {self.outer.described}, {self.compress}, by {self.weighted_by})"
        )

    def attach(self, attachment: Attachment) -> StreamingExchange:
        if self.compress != "none":
            check_compressible(attachment.parameters, f"{self.name}(compress={self.compress!r})")
        return StreamingExchange(attachment, self)


class StreamingExchange(WeightExchange):
    def __init__(self, attachment: Attachment, algorithm: StreamingDiLoCo) -> None:
        super().__init__(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            attachment.find_unused_parameters,
        )
        self._algorithm = algorithm
        parts = cut([p.numel() * p.element_size() for p in attachment.parameters], algorithm.fragments)
        self._fragments = [
            Fragment(number, [attachment.parameters[i] for i in indices])
            for number, indices in enumerate(parts)
        ]
        self._schedule = Schedule(algorithm.sync_every, len(parts), algorithm.delay)
        self._form = form_of(algorithm.compress)
        # -1: there is no anchor yet
        self._clocks = torch.full((len(parts),), -1, dtype=torch.int64, device="cpu")
        self._lane: Communicator | None = None
        self._samples = 0.0  # that this worker has used in committed steps; as parts of global batches
        self._samples_of_step = 0.0  # in the step under way, which may still fail behind its vote
        self.rounds = 0
        """Exchanges that were applied on this worker."""
        self.dropped = 0
        """Exchanges of this worker that another generation ended."""

    # -- WeightExchange

    def begin(self, communicator: Communicator | None, plan: StepPlan) -> None:
        clocks = self._clocks.tolist()
        if clocks[0] < 0 or plan.healing:
            return
        due: list[Fragment] = []
        for fragment, clock in zip(self._fragments, clocks, strict=True):
            if fragment.own.clock != clock:  # the state of another worker, or of a checkpoint
                fragment.own = OwnState(clock, self._samples)
            if self._action(fragment, plan.step, clock) is Action.SEND:
                fragment.flight = self._send(fragment, communicator, plan.step)
            if self._action(fragment, plan.step, clock) is Action.APPLY:
                due.append(fragment)
        for fragment in due:
            assert fragment.flight is not None
            self._engine.wait(fragment.flight.pending)
        if due:
            self._engine.parameters_change()
        for fragment in due:
            fragment.apply(self._algorithm.outer, self._algorithm.alpha)

    def take_over(self) -> bool:
        applied = [fragment for fragment in self._fragments if fragment.is_applied]
        is_first = int(self._clocks[0]) < 0
        if applied or is_first:
            self._engine.parameters_change()
        for fragment in applied:
            self._clocks[fragment.number] = fragment.settle().sent
            self.rounds += 1
        if is_first:
            # The job's first step: all models are alike. Not before, for a script may load one after wrapping it.
            step = self._engine.plan.step
            for fragment in self._fragments:
                fragment.anchor.fill()
                fragment.own = OwnState(step, self._samples)
            self._clocks.fill_(step)
        self._samples_of_step = self.step_weight
        return bool(applied) or is_first

    def undo(self) -> None:
        for fragment in self._fragments:
            if fragment.is_applied:
                fragment.put_back()
                self.dropped += 1

    # -- Exchange

    def step_committed(self) -> None:
        super().step_committed()
        self._samples += self._samples_of_step
        self._samples_of_step = 0.0

    def step_rolled_back(self) -> None:
        super().step_rolled_back()
        self._samples_of_step = 0.0

    def communicator_changed(self) -> None:
        super().communicator_changed()
        self.dropped += self._drop("another generation is in force")

    def state_replaced(self) -> None:
        # also under equal clocks: a copied model has learned nothing from this worker's samples
        for fragment, clock in zip(self._fragments, self._clocks.tolist(), strict=True):
            fragment.own = OwnState(clock, self._samples)

    def travelling(self) -> Mapping[str, torch.Tensor]:
        tensors = {"clocks": self._clocks}
        for fragment in self._fragments:
            tensors.update(fragment.travelling())
        return tensors

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._drop("training is over")
        super().finish(average)

    def close(self) -> None:
        self._drop("closed")
        super().close()

    # -- exchanges

    def _action(self, fragment: Fragment, step: int, clock: int) -> Action:
        sent = None if fragment.flight is None else fragment.flight.sent
        return self._schedule.decide(fragment.number, step, clock, sent).action

    def _send(self, fragment: Fragment, communicator: Communicator | None, step: int) -> Flight:
        gradients = fragment.gradients()
        errors = fragment.own.errors
        if communicator is None:
            for gradient, error in zip(gradients, errors, strict=False):  # nothing is lost any more
                gradient.add_(error.to(gradient.device))
            return Flight(step, self._samples, gradients, DonePending())
        weight = self._samples - fragment.own.began
        if self._algorithm.weighted_by == WORKERS:
            weight = float(weight > 0)
        self._lane = communicator.lanes[Lane.BACKGROUND]
        feedback: Feedback | None = None
        if self._form is not None:
            feedback = Feedback(self._form, errors or fragment.no_errors(), fragment.no_errors())
        act = partial(weighted_mean, gradients=gradients, weight=weight, feedback=feedback)
        pending = BackgroundExchange(self._lane, gradients, act)
        return Flight(
            step, self._samples, gradients, pending, [] if feedback is None else list(feedback.left)
        )

    def _drop(self, reason: str) -> int:
        """Gives up the exchanges under way, whose memory is not used again. Returns how many there were."""
        flights = [fragment.flight for fragment in self._fragments if fragment.flight is not None]
        for fragment in self._fragments:
            fragment.flight = None
        lane, self._lane = self._lane, None
        if lane is not None and not all(flight.pending.is_done() for flight in flights):
            lane.abort(reason)
        return len(flights)
