"""Implements local SGD: workers train by themselves for a round of many steps; then their models become one again.

Owns the rounds. The anchor is the model with which the round began, alike on all workers. At the start of the step that
begins the next round, before its forward, the mean of the workers' models is made; an outer optimizer may take its
distance from the anchor as a gradient. The result is the new anchor, and every worker's model.

That exchange is part of a step, which can fail as a whole. Anchor and momentum stay as they are until the step's vote;
the model trains on provisionally, and is put back if the step fails. The vote is an allreduce that each rank joins
after its exchange: if it succeeds anywhere, every exchange has succeeded, and a rank that missed it heals. The
survivors begin the same round anew, with what they have learned.

Anchor, momentum and the step in which the round began travel with the job's state, so that a joiner copies them beside
its first step. Nothing of them may be written meanwhile: a round that is due in a step in which a worker heals (the
plan tells all ranks) begins one step later.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.round_average import RoundAverage
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.compressed.feedback_sum import COMPRESSIONS, form_of
from bagua_core.communication.devices.device_wait import last_awaited
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import Job
from bagua_core.communication.step_interface import StepPlan
from bagua_core.communication.weights.compressed_mean import compressed_mean
from bagua_core.communication.weights.outer_step import OUTER_LR, OUTER_MOMENTUM, OuterStep
from bagua_core.communication.weights.weight_buckets import FlatWeights, check_compressible
from bagua_core.communication.weights.weight_exchange import WeightExchange

# A sixteenth of the traffic; replicas of common models stay close enough for the mean to be as good as each of them.
DEFAULT_SYNC_EVERY = 16
NESTEROV = "nesterov"
STEP, ROUND = "step", "round"


class LocalSGD(Algorithm):
    """Lets each worker take many steps on its own, then replaces all models by their mean.

    sync_every: steps of a round.
    outer_optimizer: None (the mean as it is), or "nesterov": outer_lr and outer_momentum act on what a round has
    changed, as in DiLoCo, which goes with long rounds (hundreds of steps).
    compress: "uint8" sends what a round has changed as one byte a weight, "int4" in about half a byte (by rounds alone,
    where both have error feedback).
    unit: what all workers commit together. "step": every step, so that the slowest worker sets the pace. "round": a
    whole round, in which each worker takes as many local steps as its speed allows (docs/design/rounds.md); needs
    ElasticDataLoader.
    Raises ValueError; `attach` does for parameters that can't be compressed.

    Commits: a step is final when all members have computed it; one that begins a round, when all have the new model
    too. Heals: a joiner copies one holder's model and optimizer, and the round's anchor and outer momentum. Exactly
    once: every sample is computed and counted once; what a worker learned since its round began goes with it when it is
    lost.
    """

    name = "local_sgd"
    equal_states = False

    def __init__(
        self,
        sync_every: int = DEFAULT_SYNC_EVERY,
        outer_optimizer: str | None = None,
        outer_lr: float = OUTER_LR,
        outer_momentum: float = OUTER_MOMENTUM,
        compress: str = "none",
        unit: str = STEP,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every}; use 1 or more steps")
        if outer_optimizer not in (None, NESTEROV):
            raise ValueError(f'outer_optimizer={outer_optimizer!r} is unknown; use None or "{NESTEROV}"')
        outer = OuterStep(outer_lr, outer_momentum)
        if compress not in COMPRESSIONS:
            raise ValueError(f"compress={compress!r} is unknown; use one of {', '.join(COMPRESSIONS)}")
        if unit not in (STEP, ROUND):
            raise ValueError(f'unit={unit!r} is unknown; use "{STEP}" or "{ROUND}"')
        if compress == "int4" and unit == STEP:
            raise ValueError(
                'compress="int4" needs unit="round"; by steps, use StreamingDiLoCo(compress="int4")'
            )
        self.sync_every = sync_every
        self.unit = unit
        self.outer = None if outer_optimizer is None else outer
        self.compress = compress

    @property
    def described(self) -> str:
        outer = "mean" if self.outer is None else self.outer.described
        unit = "" if self.unit == STEP else f", unit {self.unit}"
        return f"{self.name}(every {self.sync_every}, {outer}, {self.compress}{unit})"

    @property
    def round_steps(self) -> int | None:
        return self.sync_every if self.unit == ROUND else None

    def attach(self, attachment: Attachment) -> Exchange:
        if self.compress != "none":
            check_compressible(attachment.parameters, f"{self.name}(compress={self.compress!r})")
        if self.unit == ROUND:
            return RoundAverage(attachment, self.outer, form_of(self.compress))
        return LocalSGDExchange(attachment, self.sync_every, self.outer, self.compress != "none")


class LocalSGDExchange(WeightExchange):
    def __init__(
        self, attachment: Attachment, sync_every: int, outer: OuterStep | None, compresses: bool
    ) -> None:
        super().__init__(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            attachment.find_unused_parameters,
        )
        self._sync_every = sync_every
        self._outer = outer
        self._compresses = compresses
        self._anchor = FlatWeights(attachment.parameters, widen=True)
        self._anchor.fill()
        self._momentum = [] if outer is None else self._anchor.like()
        # step of the round; -1: there is no anchor yet
        self._began = torch.full((1,), -1, dtype=torch.int64, device="cpu")
        # the mean on its way, then the next anchor
        self._next = FlatWeights(attachment.parameters, widen=True)
        self._next_momentum = [] if outer is None else self._anchor.like()
        self._before = FlatWeights(attachment.parameters)
        self._is_under_way = False
        self._is_changed = False  # the model, by this step's exchange

    def begin(self, communicator: Communicator | None, plan: StepPlan) -> None:
        began = int(self._began)
        if began < 0 or plan.healing or plan.step - began < self._sync_every:
            return
        self._before.fill()
        self._next.fill()
        if communicator is not None:
            self._is_under_way = True
            for pending in self._mean(communicator):
                self._engine.wait(pending)
            self._is_under_way = False
        if self._outer is not None:
            for model, anchor in zip(self._next.flats, self._anchor.flats, strict=True):
                model.neg_().add_(anchor)
            self._outer.take(self._anchor.flats, self._momentum, self._next.flats, self._next_momentum)
        self._engine.parameters_change()
        self._is_changed = True
        self._next.write_back()

    def take_over(self) -> bool:
        if self._is_changed:
            self._engine.parameters_change()
            self._anchor.take(self._next.flats)
            if self._momentum:
                torch._foreach_copy_(self._momentum, self._next_momentum)
        elif int(self._began) < 0:
            # The job's first step: all models are alike. Not before, for a script may load one after wrapping it.
            self._engine.parameters_change()
            self._anchor.fill()
        else:
            return False
        self._began.fill_(self._engine.plan.step)
        self._is_changed = False
        return True

    def undo(self) -> None:
        if self._is_under_way:
            self._next.renew()
        elif self._is_changed:
            self._before.write_back()
        self._is_under_way = self._is_changed = False

    def travelling(self) -> Mapping[str, torch.Tensor]:
        return {
            **{f"anchor.{i}": flat for i, flat in enumerate(self._anchor.flats)},
            **{f"momentum.{i}": flat for i, flat in enumerate(self._momentum)},
            "round_began": self._began,
        }

    def _mean(self, communicator: Communicator) -> Job:
        """Makes the mean of the workers' models in `_next`."""
        models, count = self._next.flats, communicator.world_size
        if not self._compresses:
            yield from last_awaited([communicator.allreduce(flat) for flat in models], models)
            torch._foreach_div_(models, count)
            return
        for model, anchor in zip(models, self._anchor.flats, strict=True):
            yield from compressed_mean(communicator, model.sub_(anchor))
            model.add_(anchor)
