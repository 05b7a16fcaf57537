"""QAdam: Adam whose first moment is what the ranks exchange, in eight bits or one, once its second moment rests.

Commits and heals as plain data parallelism does, and all ranks hold the same bits after each step. In the warm-up
gradients are averaged in full precision. After it each rank contributes its share of

    (k * m + gradient) / d,    k = beta1 / (1 - beta1),    d = sqrt(exp_avg_sq) + eps

to a compressed sum S. That is the new first moment in units of the step that Adam would take (divided by 1 - beta1), so
one compressor serves layers of any scale, and what it loses is a part of such a step. What comes out as .grad is
S * d - k * m: the one gradient by which an ordinary Adam gets the first moment that was agreed on. Hence gradient
scaling, accumulation and logging mean what they always do. With one bit, whose errors even out over steps and not
within one, clipping by norm does not.

Moments belong to the optimizer's state, so whoever heals gets them. What one bit lost stays with the rank that
lost it, and goes with it (see compression.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.communication.bucket_buffer import Bucket
from bagua_core.communication.communicator import Communicator, Lane, Pending, ReduceOp
from bagua_core.communication.compressed_sum import CompressedSum, Load, is_compressed
from bagua_core.communication.compression import Compression, MinMax, OneBit
from bagua_core.communication.conveyor import Conveyor, Job, conveyor_of
from bagua_core.communication.exchange import Exchange
from bagua_core.communication.reducer import Reducer
from bagua_core.communication.routes import lanes_for, route_of
from bagua_core.elastic.step_interface import StepEngine

_COMPRESSIONS: dict[int, Callable[[], Compression]] = {8: MinMax, 1: OneBit}


class QAdam(Algorithm):
    """optimizer: the one of the model's parameters; None: the only QAdamOptimizer that the model is given.
    hierarchical: workers of one node sum up uncompressed first, and only one of each crosses the network. bits: 8, or 1
    with error feedback. Raises ValueError."""

    name = "qadam"

    def __init__(
        self, optimizer: QAdamOptimizer | None = None, hierarchical: bool = True, bits: int = 8
    ) -> None:
        if bits not in _COMPRESSIONS:
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
        operation = FirstMomentSum(
            conveyor_of(attachment.engine),
            _COMPRESSIONS[self.bits](),
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


@dataclass(slots=True)
class _Phase:
    """Of one step. is_warm: whether moments are exchanged, known once the step's first job has begun."""

    is_warm: bool
    must_ask: bool
    undecoded: list[Load] = field(default_factory=list)


class FirstMomentSum(CompressedSum):
    """Averages gradients until the warm-up is over, then sums first moments.

    Whether it is over is read off the optimizer's state, which is alike on all ranks but those that heal: in a step
    with such ranks the others tell them, in one tiny message. One that heals contributes nothing and needs the moments
    only at the end, when they have arrived.
    """

    def __init__(
        self,
        conveyor: Conveyor,
        compression: Compression,
        hierarchical: bool,
        optimizer: QAdamOptimizer,
        parameters: Sequence[torch.nn.Parameter],
        engine: StepEngine,
    ) -> None:
        super().__init__(conveyor, compression, hierarchical)
        self._moments = FirstMoments(optimizer)
        self._optimizer = optimizer
        self._parameters = parameters
        self._engine = engine
        self._phase = _Phase(False, False)

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if number == 0:
            plan = self._engine.plan
            is_warm = plan.active_index is not None and self._optimizer.is_warm(self._parameters)
            self._phase = _Phase(is_warm, must_ask=bool(plan.healing))
        return super().launch(communicator, bucket, number, weight)

    def reduced(self) -> None:
        super().reduced()
        undecoded, self._phase.undecoded = self._phase.undecoded, []
        for load in undecoded:
            self._moments.decode(load.views, self._members(load))

    def failed(self) -> None:
        super().failed()
        self._phase = _Phase(False, False)

    def _members(self, load: Load) -> list[torch.nn.Parameter]:
        return [self._parameters[i] for i in load.plan.members]

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
        self._moments.encode(load.views, self._members(load), load.weight)
        yield from self._sum_compressed(load, route)
        if load.weight == 0.0:
            phase.undecoded.append(load)  # its moments may still be on their way
        else:
            self._moments.decode(load.views, self._members(load))


class FirstMoments:
    """Between gradients and what is compressed, in place; see the top of this file. Parameters that have not been
    stepped have no moments: their gradients stay as they are."""

    def __init__(self, optimizer: QAdamOptimizer) -> None:
        self._optimizer = optimizer

    def encode(self, views: Sequence[Tensor], parameters: Sequence[Tensor], weight: float) -> None:
        """views: sums of weight times gradient, where each view's weights sum to `weight`."""
        for of_group in self._grouped(views, parameters):
            if weight:
                torch._foreach_add_(of_group.views, of_group.firsts, alpha=weight * of_group.k)
            torch._foreach_div_(of_group.views, of_group.scales())

    def decode(self, views: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        for of_group in self._grouped(views, parameters):
            scales = of_group.scales()
            for scale, has_resting in zip(scales, of_group.have_resting, strict=True):
                if has_resting:
                    scale.masked_fill_(scale.isinf(), 0.0)
            torch._foreach_mul_(of_group.views, scales)
            torch._foreach_add_(of_group.views, of_group.firsts, alpha=-of_group.k)

    def _grouped(self, views: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[_Alike]:
        settings = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        found: dict[tuple[float, float], _Alike] = {}
        for view, parameter in zip(views, parameters, strict=True):
            state = self._optimizer.state.get(parameter)
            if not state:
                continue
            group = settings[parameter]
            (beta1, beta2), steps = group["betas"], min(int(state["step"]), group["warmup_steps"])
            k, eps = beta1 / (1 - beta1), group["eps"] * math.sqrt(1 - beta2**steps)
            found.setdefault((k, eps), _Alike(k, eps)).add(view, state)
        return list(found.values())


@dataclass(slots=True)
class _Alike:
    """Parameters with the same constants, their views and moments."""

    k: float
    eps: float
    views: list[Tensor] = field(default_factory=list)
    firsts: list[Tensor] = field(default_factory=list)
    seconds: list[Tensor] = field(default_factory=list)
    have_resting: list[bool] = field(default_factory=list)

    def add(self, view: Tensor, state: dict[str, Any]) -> None:
        self.views.append(view)
        self.firsts.append(state["exp_avg"])
        self.seconds.append(state["exp_avg_sq"])
        self.have_resting.append(bool(state.get("resting")))

    def scales(self) -> list[Tensor]:
        """How large a step of Adam is measured to be, for each element, up to one factor."""
        found: Any = torch._foreach_sqrt(self.seconds)
        torch._foreach_add_(found, self.eps)
        return list(found)
