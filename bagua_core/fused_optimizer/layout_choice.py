"""Decides how blocks are laid out from now on, by what the steps so far kept, copied, and took.

Every answer is right for the result; only the time differs. Whether it pays to cut large parameters depends on how
often the optimizer passes over memory and on the machine's caches, so steps of both kinds are timed, in turns, and the
quicker kind stays. Replicas learn nothing that each would find out at another step: layouts change no bits in fp32 and
fp64, but by rounding in bf16, with torch's fused kernels, compiled, and where an optimizer sums over all parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bagua_contract.environment import variable
from bagua_core.fused_optimizer.block import Block

# Of torch's launchers, and of a worker of a job: that may be alone now, and not from the next step on.
_WORLD, _OF_A_JOB = "WORLD_SIZE", variable("worker_id")


def is_alone() -> bool:
    if _OF_A_JOB in os.environ or os.environ.get(_WORLD, "1") not in ("", "1"):
        return False
    distributed = torch.distributed
    return not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    )


STEPS_OF_A_TURN = 3  # the first of which lays out, and is not counted
TURNS = 4  # cut, whole, cut, whole
STEPS_TO_SETTLE = TURNS * STEPS_OF_A_TURN
_WORTH_IT = 0.98  # what cutting takes of the time of not cutting, at most


class CutOrNot:
    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._steps = 0
        self.cuts = True

    @property
    def is_settled(self) -> bool:
        return self._steps == STEPS_TO_SETTLE

    def took(self, seconds: float) -> bool:
        """Counts a step, done as `cuts` says, that took so long. Returns whether `cuts` is another from now on."""
        if self.is_settled:
            return False
        if self._steps % STEPS_OF_A_TURN:
            self._seconds[self.cuts].append(seconds)
        self._steps += 1
        if self._steps % STEPS_OF_A_TURN:
            return False
        did = self.cuts
        if self.is_settled:
            cut_s, whole_s = (min(self._seconds[kind]) for kind in (True, False))
            self.cuts = cut_s <= _WORTH_IT * whole_s
        else:
            self.cuts = not did
        return self.cuts is not did


class LayoutChoice:
    """Learns from steps how blocks are best laid out.

    cuts_stateless, cuts_states: whether large parameters are cut, without states and with. gradients_stay: whether the
    script keeps them from step to step, as far as compiled blocks go by it.

    cutting: whether those with states are; always if None. alone: whether no other process steps copies of these
    parameters.
    """

    def __init__(self, cutting: CutOrNot | None = None, alone: Callable[[], bool] = is_alone) -> None:
        self.cutting = cutting
        self._alone = alone
        self.cuts_stateless = True
        self._stay: bool | None = False  # None: they did, and no more, so it is left at that
        self._cut: list[Tensor] = []  # the members of blocks that were, while both kinds are timed

    @property
    def cuts_states(self) -> bool:
        return self.cutting is None or self.cutting.cuts

    @property
    def gradients_stay(self) -> bool:
        return bool(self._stay)

    def options_changed(self) -> None:
        """Cuts parameters without states again: what the optimizer keeps for a parameter may be another thing from now
        on."""
        self.cuts_stateless = True

    def learn(self, stepped: Sequence[Block], compiled: bool) -> bool:
        """Learns from a step on these blocks. Returns whether they are better laid out anew."""
        anew = compiled and self._alone() and self._learn_gradients(stepped)
        if self.cuts_stateless and any(len(block.pieces) > 1 and block.is_stateless for block in stepped):
            self.cuts_stateless = False  # what passes over memory once gains nothing from the cache
            return True
        return anew

    def _learn_gradients(self, stepped: Sequence[Block]) -> bool:
        """Learns whether the script keeps gradients from step to step. Returns whether to lay out anew.

        Compiled blocks are larger where large gradients need not be copied to come together.
        """
        copies = any(block.copies_what_stays for block in stepped)
        if self._stay is False and not copies and all(block.gradients_stay for block in stepped):
            self._stay = True
            return True
        if self._stay and (copies or any(block.gradients_stay is False for block in stepped)):
            self._stay = None
            return True
        return False

    def took(self, seconds: float, stepped: Sequence[Block]) -> bool:
        """Counts the whole time of a step that was not compiled. Returns whether it is better laid out anew.

        Only those steps count in which all of the parameters that are cut or not had gradients.
        """
        cutting = self.cutting
        if cutting is None or cutting.is_settled or not self._alone():
            return False
        if cutting.cuts:
            cut = [m for block in stepped if len(block.pieces) > 1 and block.homes[0] for m in block.members]
            if len(cut) < max(1, len(self._cut)):
                return False
            self._cut = cut
        elif any(member.grad is None for member in self._cut):
            return False
        anew = cutting.took(seconds)
        if cutting.is_settled:
            self._cut = []
        return anew
