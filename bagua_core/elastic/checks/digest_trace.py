"""Finds the step after which parameters first differed, by a digest after every step while that is cheap.

Owns the digests since the last comparison, how often one is taken (in steps that are multiples of a power of two,
so that ranks with different clocks still have steps in common), and the search in what all ranks gathered.
Each digest sees every bit of every parameter. Knows no communicator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bagua_core.elastic.state import flat_tensors
from bagua_core.elastic.state.flat_digest import digest_of_bytes

FRACTION_OF_STEP = 0.005
LEAST_BUDGET_S = 35e-6  # a part of what the other elastic work of a tiny step takes
_GATHERED_BYTES = 256 << 10  # copied at once, at most; larger tensors are read where they lie
_FORGET_FACTOR = 1.05  # a cost measured once in a quiet moment is not believed for ever


class ParameterDigest:
    """A digest of 63 bits of a fixed list of parameters, many small ones at the cost of one."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._sizes = [p.numel() for p in self._parameters]
        small = [p for p in self._parameters if p.device.type == "cpu" and p.nbytes <= _GATHERED_BYTES]
        self._large = [p for p in self._parameters if p.device.type != "cpu" or p.nbytes > _GATHERED_BYTES]
        self._groups = _gathered_groups(small)

    @property
    def is_on_host(self) -> bool:
        return all(p.device.type == "cpu" for p in self._parameters)

    @property
    def scratch_bytes(self) -> int:
        """The memory that this digest keeps beside the parameters."""
        return max((group.run.untyped_storage().nbytes() for group in self._groups), default=0)

    def fits(self) -> bool:
        """Tells whether the parameters still have the sizes they had."""
        return [p.numel() for p in self._parameters] == self._sizes

    def value(self) -> int:
        with torch.no_grad():
            found = digest_of_bytes(group.filled() for group in self._groups)
            if self._large:
                found ^= flat_tensors.digest(self._large)
        return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that are gathered and read together. All groups share their memory, so one is read before the next is
    filled."""

    parameters: list[torch.Tensor]
    slots: list[torch.Tensor]  # of `parameters`, views of `run`
    gaps: list[torch.Tensor]  # of `run`, between the slots; another group may have filled them
    run: torch.Tensor

    def filled(self) -> torch.Tensor:
        if self.gaps:
            torch._foreach_zero_(self.gaps)
        torch._foreach_copy_(self.slots, self.parameters)
        return self.run


def _gathered_groups(parameters: Sequence[torch.Tensor]) -> list[_Group]:
    """Groups parameters that are gathered and read together. parameters: of _GATHERED_BYTES at most, each.

    A copy of all would be a second model where all are small.
    """
    parts: list[list[torch.Tensor]] = []
    left = 0
    for p in parameters:
        if not parts or _slot_bytes(p) > left:
            parts.append([])
            left = _GATHERED_BYTES
        parts[-1].append(p)
        left -= _slot_bytes(p)
    sizes = [sum(map(_slot_bytes, part)) for part in parts]
    memory = torch.zeros(max(sizes, default=0), dtype=torch.uint8, device="cpu")
    groups = []
    for part, size in zip(parts, sizes, strict=True):
        slots, gaps, at = [], [], 0
        for p in part:
            end = at + _slot_bytes(p)
            slots.append(memory[at : at + p.nbytes].view(p.dtype).view(p.shape))
            if at + p.nbytes < end and len(parts) > 1:
                gaps.append(memory[at + p.nbytes : end])
            at = end
        groups.append(_Group(part, slots, gaps, memory[:size]))
    return groups


def _slot_bytes(tensor: torch.Tensor) -> int:
    """Returns the size of the tensor's slot.

    It is a multiple of the largest element, complex128, so that the next slot can be a view of any dtype.
    """
    return -(-tensor.nbytes // 16) * 16


def stride(cost_s: float, step_s: float, most: int) -> int:
    """Returns the number of steps from one digest to the next that keeps digests within their share of the time.

    It is a power of two, at most `most` (then none, or one, between two comparisons).
    """
    budget_s = max(LEAST_BUDGET_S, FRACTION_OF_STEP * step_s)
    steps = 1
    while steps < most and cost_s > budget_s * steps:
        steps *= 2
    return steps


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between ranks.

    step: the first one known to differ. agreed_after: the last one known not to; equal to step - 1 if the difference is
    known to have come about in `step`. odd: global ranks that differ from what more than half of all have. all_differ:
    there is no such majority, so nothing says who is right; `odd` is all.
    """

    step: int
    agreed_after: int
    odd: tuple[int, ...]
    all_differ: bool = False

    @property
    def is_exact(self) -> bool:
        return self.agreed_after == self.step - 1


def first_difference(
    digests: Sequence[Mapping[int, int]], last_equal: Sequence[int], compared: Sequence[int], step: int
) -> Difference:
    """Finds the first step after which the ranks' digests differ.

    digests: by global_rank, those taken since the last comparison by step. last_equal: by global_rank, the step of that
    comparison. compared: by global_rank, the digests after `step`, which differ.
    """
    steps = sorted({s for of_rank in digests for s in of_rank if s < step})
    values, first = dict(enumerate(compared)), step
    for earlier in steps:
        found = {r: of_rank[earlier] for r, of_rank in enumerate(digests) if earlier in of_rank}
        if len(set(found.values())) > 1:
            values, first = found, earlier
            break
    agreed = max(last_equal)
    for earlier in steps:
        # only a step that all of them took says that they agreed then
        if earlier < first and all(earlier in digests[r] for r in values):
            agreed = max(agreed, earlier)
    seen = list(values.values())
    usual = max(sorted(set(seen)), key=seen.count)
    if 2 * seen.count(usual) <= len(seen):
        return Difference(first, agreed, tuple(values), all_differ=True)
    return Difference(first, agreed, tuple(r for r, v in values.items() if v != usual))


class DigestTrace:
    """Holds this rank's digests since the last comparison.

    clock: seconds. processor: seconds that this process has used.
    """

    def __init__(
        self,
        most_steps: int,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._most_steps = most_steps
        self._clock = clock
        self._processor = processor
        self._digest: ParameterDigest | None = None
        self._taken: dict[int, int] = {}
        self._cost_s: float | None = None
        self._step_s: float | None = None
        self._last_step_at_s: tuple[float, float] | None = None  # by clock and processor
        self._is_warm = False

    @property
    def taken(self) -> Mapping[int, int]:
        return self._taken

    @property
    def every_steps(self) -> int:
        if self._cost_s is None or self._step_s is None:
            return 1
        return stride(self._cost_s, self._step_s, self._most_steps)

    def step_done(self, parameters: Callable[[], Sequence[torch.Tensor]], step: int) -> None:
        """Measures the step, and takes a digest if one is due.

        parameters: asked for only where none, or others, are known.
        """
        began_s, used_s = self._clock(), self._processor()
        if self._last_step_at_s is not None:
            lasted_s = began_s - self._last_step_at_s[0]
            if self._digest is not None and self._digest.is_on_host:
                # while workers share processors, or wait for each other, a step lasts longer than it costs
                lasted_s = min(lasted_s, used_s - self._last_step_at_s[1])
            self._step_s = _lower(self._step_s, lasted_s)
        self._last_step_at_s = began_s, used_s
        if step % self.every_steps:
            return
        if self._digest is None or not self._digest.fits():
            self._digest, self._is_warm = ParameterDigest(parameters()), False
        self._taken[step] = self._digest.value()
        if self._is_warm:
            self._cost_s = _lower(self._cost_s, self._clock() - began_s)
        self._is_warm = True  # the first time touches new memory
        if len(self._taken) > self._most_steps:
            del self._taken[min(self._taken)]

    def compared(self) -> None:
        """Drops what was taken so far: all agreed, or the state is another, so it says nothing any more.

        Parameters that a script has put in the place of others are found again.
        """
        self._taken = {}
        self._digest = None


def _lower(known: float | None, measured: float) -> float:
    """Returns the least of late: what a thing costs when nothing disturbs it."""
    return measured if known is None else min(known * _FORGET_FACTOR, measured)
