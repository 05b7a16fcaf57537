"""Sums the workers' momentum over a bucket, compressed with error feedback: what QAdam does with gradients.

After the warm-up each rank has a momentum of its own, of its part g of the mean gradient, in units of the step that
Adam would take, d = sqrt(exp_avg_sq) + eps. One compressor then serves layers of any scale, and what it loses is a part
of such a step. With C the compression, ' for the step before, and sums over ranks:

    c = beta1 * c' + g / d                 this rank's momentum
    sent = C(c + E');  E = c + E' - sent   error feedback, here and once more at the owner of each chunk
    S = sum of sent                        the momentum on which all ranks agree
    .grad = d * (S - beta1 * S')           the gradient by which the optimizer comes to that momentum

In 1-bit Adam c' is the rank's share of S'. Then each step repeats the errors of the steps before, smoothed by beta1;
here each rank goes on from its own momentum, and S has the errors of two steps only.

.grad is linear in the gradients and is the mean gradient, but for errors that the next steps make up for: loss scaling,
accumulation and weight decay mean what they always do.

Late elements (qadam_optimizer.py) have no d yet. Their gradients travel uncompressed, beside the compressed message of
the others.

Invariants: c, E and S are those of the last final step, a step under way writes to other memory. S is the same on all
ranks, so all begin it anew in the same steps: the first of a generation, one in which a rank heals, and one after a
bucket travelled uncompressed or could not be represented. Then S' is the optimizer's own momentum, and c' the rank's
share of it; so are those of an element that is no longer late. E outlives that; it begins at zero, and again when a
state was loaded into the optimizer and where SumWithFeedback forgets it.
A step in which no rank used a parameter leaves its elements' c, E and S as they were: its .grad is discarded.
Which elements are late is read from the optimizer's state, so all ranks that hold the job's state agree on it; the
others receive their number from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bagua_core.algorithms.bucket_moments import BucketMoments
from bagua_core.algorithms.late_elements import sum_where_touched
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.communication.compressed.compressed_sum import Load, SumWithFeedback, is_compressed
from bagua_core.communication.compressed.compression import MinMaxWithFeedback, OneBit, WithFeedback
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.operation_queue import Job, OperationQueue
from bagua_core.communication.step_interface import StepReductions

# With one bit an element of g / d is cut to so many times its neighbours' mean. A second moment from a short warm-up
# may be far too small, and one such element would be the scale of its whole block.
REACH = 128.0


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which momentum travels. reach: in means; see REACH."""

    compression: Callable[[], WithFeedback]
    reach: float


FORMS = {8: Form(MinMaxWithFeedback, reach=math.inf), 1: Form(OneBit, reach=REACH)}


@dataclass(frozen=True, slots=True)
class _Late:
    """The late elements of a bucket. version: equal for equal elements. places, others: indices of these and of the
    rest, made without a wait of the host, which knows the count."""

    mask: Tensor
    count: int
    version: tuple[int, int]

    @property
    def places(self) -> Tensor:
        return torch.nonzero_static(self.mask, size=self.count).view(-1)

    @property
    def others(self) -> Tensor:
        return torch.nonzero_static(~self.mask, size=self.mask.numel() - self.count).view(-1)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The values of one bucket that a step leaves to the next.

    contribution: c, fp32, in the bucket's layout; None: zero. sums: S, likewise. late: the elements of which neither
    says anything; None if there are none. holds_nan: a flag for the host, see Messages.nan_flag; the next step does not
    build on NaN.
    """

    contribution: Tensor | None
    sums: Tensor
    late: _Late | None
    holds_nan: Tensor


@dataclass(frozen=True, slots=True)
class _Before:
    """The values of one bucket with which a step began. kept: c and S; None: those of the optimizer's momentum, of
    which this rank's share is `weight`."""

    kept: _Kept | None
    moments: BucketMoments
    weight: float

    def put_back(self, after: _Kept, elements: Sequence[slice]) -> None:
        """Gives `after` the c and S of these elements."""
        if self.kept is not None:
            sums, own = self.kept.sums, self.kept.contribution
        else:
            sums, own = torch.empty_like(after.sums), torch.empty_like(after.sums)
            self.moments.begin(1.0, sums)
            self.moments.begin(self.weight, own)
        for part in elements:
            after.sums[part] = sums[part]
            if after.contribution is not None:
                after.contribution[part] = 0.0 if own is None else own[part]


@dataclass(slots=True)
class _Phase:
    """The state of one step. What it leaves to the next is taken over when it is final.

    has_state: this rank holds the job's state; one that heals does not. is_warm: so far as this rank knows. asks: some
    rank heals, so the others say what it needs to know.
    """

    has_state: bool = False
    is_warm: bool = False
    asks: bool = False
    before: dict[int, _Before] = field(default_factory=dict)
    kept: dict[int, _Kept] = field(default_factory=dict)
    discarded: dict[int, Sequence[slice]] = field(default_factory=dict)
    late: dict[int, _Late | None] = field(default_factory=dict)
    undecoded: list[Callable[[], None]] = field(default_factory=list)


class MomentumSum(SumWithFeedback):
    """Averages gradients until the warm-up is over, then sums momentum.

    A rank that heals contributes nothing and needs the moments only at the end, when they have arrived.
    """

    carries_pair = True

    def __init__(
        self,
        operation_queue: OperationQueue,
        form: Form,
        hierarchical: bool,
        optimizer: QAdamOptimizer,
        parameters: Sequence[torch.nn.Parameter],
        engine: StepReductions,
    ) -> None:
        super().__init__(operation_queue, form.compression(), hierarchical, engine)
        self._reach = form.reach
        self._optimizer = optimizer
        self._parameters = parameters
        self._loads = optimizer.loads
        self._phase = _Phase()
        self._kept: dict[int, _Kept] = {}
        self._spare: dict[int, Tensor] = {}
        self._late_when_sent: dict[int, _Late | None] = {}  # the elements that E has no place for

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if number == 0:
            self._begin_step()
        return super().launch(communicator, bucket, number, weight)

    def _begin_step(self) -> None:
        plan = self._engine.plan
        has_state = plan.active_index is not None
        if not has_state or self._optimizer.loads != self._loads:  # c, E and S belong to a state that is gone
            self._loads = self._optimizer.loads
            self._feedback.forget()
            self._kept.clear()
        is_warm = has_state and self._optimizer.is_warm(self._parameters)
        self._phase = _Phase(has_state, is_warm, asks=bool(plan.healing))

    def discard(self, number: int, elements: Sequence[slice]) -> None:
        self._phase.discarded[number] = elements

    def reduced(self) -> None:
        phase, self._phase = self._phase, _Phase()
        for decode in phase.undecoded:
            decode()
        for number, elements in phase.discarded.items():
            if number in phase.kept:
                self._put_back(phase, number, elements)
        super().reduced()
        if not phase.has_state:
            self._loads = self._optimizer.loads  # the state that has arrived is the one of this step
        for number, kept in self._kept.items():
            if kept.contribution is not None:
                self._spare[number] = kept.contribution
        self._kept = phase.kept
        self._late_when_sent.update(phase.late)

    def _put_back(self, phase: _Phase, number: int, elements: Sequence[slice]) -> None:
        phase.before[number].put_back(phase.kept[number], elements)
        late = phase.late[number]
        if number in self._late_when_sent and not _are_alike(self._late_when_sent[number], late):
            return  # the earlier E lies in other places, and went with the gradients
        if late is not None:
            places = torch.nn.functional.pad((~late.mask).cumsum(0), (1, 0))
            bounds = [(part.start, part.stop) for part in elements]
            ends = torch.tensor(bounds, dtype=torch.int64, device=places.device)
            elements = [slice(begin, end) for begin, end in places[ends].tolist()]
        super().discard(number, elements)

    def failed(self) -> None:
        super().failed()
        self._phase = _Phase()

    def communicator_changed(self) -> None:
        super().communicator_changed()
        # A rank that was behind lacks the S of the last step, and the other ranks do not know that.
        self._kept.clear()

    def _sum(self, communicator: Communicator, load: Load) -> Job:
        return self._sum_in_phase(communicator, load, self._phase)

    # -- in the operation queue's thread

    def _sum_in_phase(self, communicator: Communicator, load: Load, phase: _Phase) -> Job:
        moments = BucketMoments(self._optimizer, load)
        is_warm, late_count = phase.is_warm, moments.late_count() if phase.is_warm else 0
        if phase.asks:
            said = torch.tensor([is_warm, late_count], dtype=torch.int64, device="cpu")
            yield communicator.allreduce(said, ReduceOp.MAX)
            is_warm, late_count = bool(said[0]), int(said[1])
        route = self._route(communicator, load.plan)
        plan = replace(load.plan, elements=load.plan.elements - late_count)
        if not is_warm or not is_compressed(plan, route):
            yield communicator.allreduce(load.reducible)
            return

        late = self._late(moments, late_count) if phase.has_state else None
        of_late = load.values.new_zeros(late_count) if late is None else load.values[late.places]
        before = None if phase.asks else self._kept.get(load.number)
        if before is not None and bool(before.holds_nan):
            before = None  # on all ranks, for all have received it
        if before is not None and phase.has_state:
            before = _extended(before, late, load, moments)
        phase.before[load.number] = _Before(before, moments, load.weight)
        contribution = self._encode(load, moments, before) if phase.has_state else None
        compact = load if not late_count else _without_late(load, late, late_count)
        if phase.has_state:
            self._send_again_elsewhere(compact, load.plan.elements, late)
        messages = yield from self._exchange(compact, route)
        messages.decompress(messages.gathered)
        holds_nan = messages.nan_flag()
        messages.give_back()
        if late_count:
            of_late = yield from sum_where_touched(communicator, of_late)
            if load.tail is not None and compact.tail is not None:
                load.tail.copy_(compact.tail)

        def decode(late: _Late | None) -> None:
            if late is not None:
                load.values.zero_().masked_scatter_(~late.mask, compact.values)
            sums = load.values.to(torch.float32, copy=True)
            phase.kept[load.number] = _Kept(contribution, sums, late, holds_nan)
            moments.decode(None if before is None else before.sums)
            if late is not None:
                load.values.masked_scatter_(late.mask, of_late)
            phase.late[load.number] = late

        if phase.has_state:
            decode(late)
        else:  # the moments are still on their way
            phase.undecoded.append(lambda: decode(self._late(moments, late_count)))

    def _late(self, moments: BucketMoments, late_count: int) -> _Late | None:
        if not late_count:
            return None
        return _Late(moments.late_mask(), late_count, (self._optimizer.loads, self._optimizer.freezes))

    def _encode(self, load: Load, moments: BucketMoments, before: _Kept | None) -> Tensor:
        """Replaces the bucket's values by c, in place. Returns a copy of c in fp32, whose infinities and NaNs are 0."""
        after = self._spare.pop(load.number, None)
        if after is None:
            after = load.values.new_empty(load.plan.elements, dtype=torch.float32)
        if before is None:
            moments.begin(load.weight, after)
            moments.encode(after, after, self._reach)
        elif before.contribution is None:
            moments.encode(after.zero_(), after, self._reach)
        else:
            moments.encode(before.contribution, after, self._reach)
        return after

    def _send_again_elsewhere(self, compact: Load, elements: int, late: _Late | None) -> None:
        """Adds E to the values, each element where it belongs now, if other elements are late than when E was made."""
        if compact.number not in self._late_when_sent:
            return
        before = self._late_when_sent[compact.number]
        if _are_alike(before, late):
            return
        sent = elements if before is None else elements - before.count
        unsent = self._feedback.unsent(compact.step, compact.number, sent)
        if unsent is None:
            return
        if before is not None:
            unsent = unsent.new_zeros(elements).masked_scatter_(~before.mask, unsent)
        compact.values.add_(unsent if late is None else unsent[late.others])


def _are_alike(one: _Late | None, other: _Late | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.version == other.version


def _extended(kept: _Kept, late: _Late | None, load: Load, moments: BucketMoments) -> _Kept:
    """Returns `kept` with the elements that are no longer late."""
    if _are_alike(kept.late, late) or kept.late is None:
        return kept
    fresh = kept.late.mask if late is None else kept.late.mask & ~late.mask
    begun = torch.empty_like(kept.sums)
    moments.begin(1.0, begun)
    sums = torch.where(fresh, begun, kept.sums)
    own = torch.zeros_like(kept.sums) if kept.contribution is None else kept.contribution
    return _Kept(torch.where(fresh, begun.mul_(load.weight), own), sums, late, kept.holds_nan)


def _without_late(load: Load, late: _Late | None, late_count: int) -> Load:
    """Returns the load of the other elements alone, in their order; of zeros if `late` is None."""
    plan = replace(load.plan, elements=load.plan.elements - late_count)
    flat = load.flat.new_zeros(load.flat.numel() - late_count)
    if late is not None:
        flat[: plan.elements] = load.values[late.others]
    if load.tail is not None:
        flat[plan.elements :] = load.tail
    return replace(load, plan=plan, reducible=flat, flat=flat, views=())
