"""QAdam: Adam whose steps are linear in the gradient once its second moment rests, so that what ranks exchange can be
compressed to eight bits or one.

Commits and heals as plain data parallelism does, and all ranks hold the same bits after each step. In the warm-up
gradients are averaged in full precision. After it each rank measures its share of the gradient in units of the step
that Adam would take, x = gradient / d with d = sqrt(exp_avg_sq) + eps: one compressor serves layers of any scale, and
what it loses is a part of such a step.

Eight bits send x. One bit, for which single gradients are too uneven, sends what they add up to, smoothed as Adam
smooths them: c = BETA * c' + x, where c' is this rank's own c of the step before. Whoever receives S, the sum of all c,
undoes that: S - BETA * S'. (If c' were the moment that all agreed on, what a step loses would come back in each of
those that follow, ten times in all.) Either way .grad is the mean gradient, but for what compression holds back for
now: scaling, accumulation, weight decay and logging mean what they always do. With one bit, whose errors even out over
steps and not within one, clipping by norm does not.

Moments belong to the optimizer's state, so whoever heals gets them. c and S' begin with the first moment, and begin
anew in a step in which a rank heals or chunks have changed hands. What one bit lost stays with the rank that lost it,
and goes with it (see compression.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bagua_core import kernels
from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer, flat_like
from bagua_core.communication.bucket_buffer import Bucket
from bagua_core.communication.chunks import Chunks
from bagua_core.communication.communicator import Communicator, Lane, Pending, ReduceOp
from bagua_core.communication.compressed_sum import CompressedSum, Load, is_compressed
from bagua_core.communication.compression import Compression, MinMax, OneBit
from bagua_core.communication.conveyor import Conveyor, Job, conveyor_of
from bagua_core.communication.exchange import Exchange
from bagua_core.communication.reducer import Reducer
from bagua_core.communication.routes import lanes_for, route_of
from bagua_core.elastic.step_interface import StepEngine

# Adam's own default, whatever the optimizer's: whoever receives undoes it.
BETA = 0.9

# With one bit an element is cut to so many times its neighbours' mean. A second moment from few steps may be far too
# small, and what one such element is measured to be would be the scale of its whole block, and come back as its error.
REACH = 128.0


@dataclass(frozen=True, slots=True)
class _Form:
    """What travels. reach: in means; see REACH."""

    compression: Callable[[], Compression]
    is_smoothed: bool
    reach: float


_FORMS = {
    8: _Form(MinMax, is_smoothed=False, reach=math.inf),
    1: _Form(OneBit, is_smoothed=True, reach=REACH),
}


class QAdam(Algorithm):
    """optimizer: the one of the model's parameters; None: the only QAdamOptimizer that the model is given.
    hierarchical: workers of one node sum up uncompressed first, and only one of each crosses the network. bits: 8, or 1
    with error feedback. Raises ValueError."""

    name = "qadam"

    def __init__(
        self, optimizer: QAdamOptimizer | None = None, hierarchical: bool = True, bits: int = 8
    ) -> None:
        if bits not in _FORMS:
            raise ValueError(f"QAdam: bits={bits!r}; use 8 or 1")
        self.optimizer = optimizer
        self.hierarchical = hierarchical
        self.bits = bits

    @property
    def lanes(self) -> frozenset[Lane]:
        return lanes_for(self.hierarchical)

    @property
    def described(self) -> str:
        return f"{self.name}(hierarchical={self.hierarchical}, bits={self.bits})"

    def attach(self, attachment: Attachment) -> Exchange:
        operation = StepSum(
            conveyor_of(attachment.engine),
            _FORMS[self.bits],
            self.hierarchical,
            self._optimizer_of(attachment),
            attachment.parameters,
            attachment.engine,
        )
        return Reducer(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            operation=operation,
            find_unused_parameters=attachment.find_unused_parameters,
        )

    def _optimizer_of(self, attachment: Attachment) -> QAdamOptimizer:
        given = [o for o in attachment.optimizers if isinstance(o, QAdamOptimizer)]
        if self.optimizer is not None and not any(o is self.optimizer for o in given):
            raise ValueError("QAdam's optimizer is none of the model's; pass optimizers=[optimizer] too")
        if self.optimizer is None and len(given) != 1:
            raise ValueError(
                f"QAdam needs the model's QAdamOptimizer, and {len(given)} were given; pass optimizers=[optimizer]"
            )
        optimizer = self.optimizer or given[0]
        known = {p for group in optimizer.param_groups for p in group["params"]}
        strange = sum(p not in known for p in attachment.parameters)
        if strange:
            raise ValueError(
                f"{strange} of the model's parameters are not the QAdamOptimizer's; give it all of them"
            )
        return optimizer


@dataclass(frozen=True, slots=True)
class _Smoothed:
    """Of one bucket and step. contribution: this rank's c, fp32, in the bucket's layout. sums: S as it was received,
    the same on all ranks."""

    chunks: Chunks
    contribution: Tensor
    sums: Tensor


@dataclass(slots=True)
class _Phase:
    """Of one step. is_warm: whether steps of Adam are exchanged, known once the step's first job has begun.
    begins_anew: some rank lacks what is smoothed over steps. smoothed: what this step leaves to the next, by bucket."""

    is_warm: bool
    must_ask: bool
    begins_anew: bool
    smoothed: dict[int, _Smoothed] = field(default_factory=dict)
    undecoded: list[Callable[[], None]] = field(default_factory=list)


class StepSum(CompressedSum):
    """Averages gradients until the warm-up is over, then sums them as steps of Adam.

    Whether it is over is read off the optimizer's state, which is alike on all ranks but those that heal: in a step
    with such ranks the others tell them, in one tiny message. One that heals contributes nothing and needs the moments
    only at the end, when they have arrived.
    """

    def __init__(
        self,
        conveyor: Conveyor,
        form: _Form,
        hierarchical: bool,
        optimizer: QAdamOptimizer,
        parameters: Sequence[torch.nn.Parameter],
        engine: StepEngine,
    ) -> None:
        super().__init__(conveyor, form.compression(), hierarchical)
        self._is_smoothed = form.is_smoothed
        self._moments = Moments(optimizer, form.reach)
        self._optimizer = optimizer
        self._parameters = parameters
        self._engine = engine
        self._phase = _Phase(False, False, False)
        self._smoothed: dict[int, _Smoothed] = {}
        self._spare: dict[int, Tensor] = {}

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if number == 0:
            plan = self._engine.plan
            is_warm = plan.active_index is not None and self._optimizer.is_warm(self._parameters)
            self._phase = _Phase(is_warm, must_ask=bool(plan.healing), begins_anew=bool(plan.healing))
        return super().launch(communicator, bucket, number, weight)

    def reduced(self) -> None:
        super().reduced()
        phase, self._phase = self._phase, _Phase(False, False, False)
        for decode in phase.undecoded:
            decode()
        # a step in which a bucket was not smoothed breaks the sequence, and the next one begins anew
        for number, smoothed in self._smoothed.items():
            self._spare[number] = smoothed.contribution
        self._smoothed = phase.smoothed

    def failed(self) -> None:
        super().failed()
        self._phase = _Phase(False, False, False)

    def _sum(self, communicator: Communicator, load: Load) -> Job:
        return self._sum_in_phase(communicator, load, self._phase)

    # -- in the conveyor's thread

    def _sum_in_phase(self, communicator: Communicator, load: Load, phase: _Phase) -> Job:
        if phase.must_ask and load.number == 0:
            said = torch.tensor([phase.is_warm], dtype=torch.uint8)
            communicator.allreduce(
                said, ReduceOp.MAX
            ).wait()  # at once: the jobs behind this one need to know
            phase.is_warm = bool(said.item())
        route = route_of(communicator, self._hierarchical)
        if not phase.is_warm or not is_compressed(load.plan, route):
            yield communicator.allreduce(load.reducible)
            return
        members = [
            _Member(self._parameters[index], load.values, offset, view)
            for index, offset, view in zip(load.plan.members, load.plan.offsets, load.views, strict=True)
        ]
        before = None if phase.begins_anew else self._smoothed.get(load.number)
        if before is not None and before.chunks.owners != route.parties:
            before = None
        contribution = self._encode(load, members, before)
        messages = yield from self._exchange(load, route)
        messages.decompress(messages.gathered)
        if before is not None:
            messages.decompress(before.sums, -BETA, add=True)
        # all ranks see a NaN in what they all received, and leave it behind
        if contribution is not None and not messages.hold_nan():
            phase.smoothed[load.number] = _Smoothed(messages.chunks, contribution, messages.gathered.clone())
        messages.give_back()

        def decode() -> None:
            self._moments.decode(members, lag=BETA if contribution is not None and before is None else 0.0)

        if load.weight == 0.0:
            phase.undecoded.append(decode)  # its moments may still be on their way
        else:
            decode()

    def _encode(self, load: Load, members: Sequence[_Member], before: _Smoothed | None) -> Tensor | None:
        """To this rank's contribution, in place. Returns what is kept of it."""
        if not self._is_smoothed:
            if load.weight:
                self._moments.encode(members)
            return None
        contribution = self._spare.pop(load.number, None)
        if contribution is None:
            contribution = load.values.new_zeros(load.plan.elements, dtype=torch.float32)
        if before is not None:
            self._moments.encode(members, before.contribution, contribution)
        elif load.weight:
            self._moments.begin(members, load.weight, contribution)
            self._moments.encode(members, contribution, contribution)
        else:
            contribution.zero_()
        return contribution


@dataclass(frozen=True, slots=True)
class _Member:
    """A parameter's place in a bucket. values: the bucket's. view: of this parameter's part, in its shape."""

    parameter: torch.nn.Parameter
    values: Tensor
    offset: int
    view: Tensor

    def part_of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.parameter.numel()]

    @property
    def part(self) -> Tensor:
        return self.part_of(self.values)

    def in_place(self, moment: Tensor) -> Tensor:
        """A moment of the parameter, [elements], in the order in which the bucket holds them."""
        return flat_like(self.view, moment.to(self.view.dtype))


class Moments:
    """Between gradients and steps of Adam, in place; see the top of this file. Parameters that have not been stepped
    have no moments: their gradients are taken as they are."""

    def __init__(self, optimizer: QAdamOptimizer, reach: float) -> None:
        self._optimizer = optimizer
        self._reach = reach

    def encode(
        self, members: Sequence[_Member], before: Tensor | None = None, after: Tensor | None = None
    ) -> None:
        """x instead of the gradient, or c with c' in `before`, both in the bucket's layout; c goes to `after` too."""
        for member, found in self._measured(members):
            old, new = (None if flat is None else member.part_of(flat) for flat in (before, after))
            if found is not None:
                second = member.in_place(found.state["exp_avg_sq"])
                kernels.adam_steps(
                    member.part, second, found.eps, self._reach, before=old, after=new, decay=BETA
                )
            elif old is not None and new is not None:
                torch.add(member.part, old, alpha=BETA, out=new)
                member.part.copy_(new)

    def begin(self, members: Sequence[_Member], weight: float, into: Tensor) -> None:
        """This rank's part of the first moment as if it had been made by smoothing."""
        for member, found in self._measured(members):
            part = member.part_of(into)
            if found is None:
                part.zero_()
                continue
            scale = member.in_place(found.state["exp_avg_sq"]).float().sqrt().add_(found.eps)
            part.copy_(member.in_place(found.state["exp_avg"])).mul_(weight / (1 - BETA)).div_(scale)

    def decode(self, members: Sequence[_Member], lag: float) -> None:
        """The gradient. lag: what of the first moment's smoothing is still in it."""
        for member, found in self._measured(members):
            if found is None:
                continue
            kernels.adam_gradients(member.part, member.in_place(found.state["exp_avg_sq"]), found.eps)
            if lag:
                member.part.sub_(member.in_place(found.state["exp_avg"]), alpha=lag / (1 - BETA))

    def _measured(self, members: Sequence[_Member]) -> Iterator[tuple[_Member, _Measured | None]]:
        settings = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        for member in members:
            state, group = self._optimizer.state.get(member.parameter), settings[member.parameter]
            if not state:
                yield member, None
                continue
            steps = min(int(state["step"]), group["warmup_steps"])
            yield member, _Measured(state, group["eps"] * math.sqrt(1 - group["betas"][1] ** steps))


@dataclass(frozen=True, slots=True)
class _Measured:
    """A parameter's state, and its eps in units of the second moment's root as it is kept, without its correction."""

    state: dict[str, Any]
    eps: float
