"""Local SGD: workers train by themselves for a round of many steps; then their models become one again.

Owns the rounds. The anchor is the model with which the round began, alike on all workers. At the start of the step
that begins the next round, before its forward, the mean of the workers' models is made; an outer optimizer may take
its distance from the anchor as a gradient. The result is the new anchor, and every worker's model.

That exchange is part of a step, which can fail as a whole. Anchor and momentum stay as they are until the step's
vote; the model trains on provisionally, and is put back if the step fails. The vote is an allreduce that each rank
joins after its exchange: if it succeeds anywhere, every exchange has succeeded, and a rank that missed it heals. The
survivors begin the same round anew, with what they have learned.

Anchor, momentum and the step in which the round began travel with the job's state, so that a joiner copies them
beside its first step. Nothing of them may be written meanwhile: a round that is due in a step in which a worker heals
(the plan tells all ranks) begins one step later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.devices.device_wait import Followed, last_awaited
from bagua_core.communication.reduction.conveyor import Job
from bagua_core.communication.step_interface import StepPlan
from bagua_core.communication.weights.weight_buckets import FlatWeights, check_compressible
from bagua_core.communication.weights.weight_exchange import WeightExchange
from bagua_core.kernels import minmax_compress, minmax_decompress, minmax_reduce

# A sixteenth of the traffic; replicas of common models stay close enough for the mean to be as good as each of them.
DEFAULT_SYNC_EVERY = 16
# What DiLoCo's authors found best over a wide range of models.
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
NESTEROV = "nesterov"
COMPRESSIONS = ("none", "uint8")


@dataclass(frozen=True, slots=True)
class _Outer:
    lr: float
    momentum: float


class LocalSGD(Algorithm):
    """So many steps on one's own, then all models become their mean.

    sync_every: steps of a round. outer_optimizer: None (the mean as it is), or "nesterov": outer_lr and
    outer_momentum act on what a round has changed, as in DiLoCo, which goes with long rounds (hundreds of steps).
    compress: "uint8" sends what a round has changed as one byte a weight. Raises ValueError; `attach` does for
    parameters that can't be compressed.

    Commits: a step is final when all members have computed it; one that begins a round, when all have the new model
    too. Heals: a joiner copies one holder's model and optimizer, and the round's anchor and outer momentum. Exactly
    once: every sample is computed and counted once; what a worker learned since its round began goes with it when it
    is lost.
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
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every}; use 1 or more steps")
        if outer_optimizer not in (None, NESTEROV):
            raise ValueError(f'outer_optimizer={outer_optimizer!r} is unknown; use None or "{NESTEROV}"')
        if not outer_lr > 0:
            raise ValueError(f"outer_lr={outer_lr} must be positive")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum} must be at least 0 and below 1")
        if compress not in COMPRESSIONS:
            raise ValueError(f"compress={compress!r} is unknown; use one of {', '.join(COMPRESSIONS)}")
        self.sync_every = sync_every
        self.outer = None if outer_optimizer is None else _Outer(outer_lr, outer_momentum)
        self.compress = compress

    @property
    def described(self) -> str:
        outer = "mean" if self.outer is None else f"{NESTEROV} {self.outer.lr:g} {self.outer.momentum:g}"
        return f"{self.name}(every {self.sync_every}, {outer}, {self.compress})"

    def attach(self, attachment: Attachment) -> LocalSGDExchange:
        if self.compress != "none":
            check_compressible(attachment.parameters, f"{self.name}(compress={self.compress!r})")
        return LocalSGDExchange(attachment, self.sync_every, self.outer, self.compress != "none")


class LocalSGDExchange(WeightExchange):
    def __init__(
        self, attachment: Attachment, sync_every: int, outer: _Outer | None, compresses: bool
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
        self._began = torch.full((1,), -1, dtype=torch.int64)  # step of the round; -1: there is no anchor yet
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
            self._step_outside(self._outer)
        self._engine.parameters_change()
        self._is_changed = True
        self._next.write_back()

    def take_over(self) -> None:
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
            return
        self._began.fill_(self._engine.plan.step)
        self._is_changed = False

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
        """Of the workers' models, into _next."""
        models, count = self._next.flats, communicator.world_size
        if not self._compresses:
            yield from last_awaited([communicator.allreduce(flat) for flat in models], models)
            torch._foreach_div_(models, count)
            return
        for model, anchor in zip(models, self._anchor.flats, strict=True):
            yield from _compressed_mean(communicator, model.sub_(anchor))
            model.add_(anchor)

    def _step_outside(self, outer: _Outer) -> None:
        """Nesterov's step from the anchor, against what the round has changed."""
        for model, anchor, momentum, following in zip(
            self._next.flats, self._anchor.flats, self._momentum, self._next_momentum, strict=True
        ):
            gradient = model.neg_().add_(anchor)
            torch.mul(momentum, outer.momentum, out=following).add_(gradient)
            gradient.add_(following, alpha=outer.momentum)
            torch.sub(anchor, gradient, alpha=outer.lr, out=model)


def _compressed_mean(communicator: Communicator, values: torch.Tensor) -> Job:
    """In place; all ranks get the same bits. Each makes the mean of one part, and all get it from there."""
    count = communicator.world_size
    padded = values.new_zeros((count, -(-values.numel() // count)))
    padded.view(-1)[: values.numel()] = values
    sent = minmax_compress(padded)
    received = torch.empty_like(sent)
    yield Followed(communicator.alltoall(received, sent))
    part = minmax_reduce(received, padded.shape[1], scale=1 / count)
    yield communicator.allgather(sent, part)
    minmax_decompress(sent, padded)
    values.copy_(padded.view(-1)[: values.numel()])
