"""How should blocks be laid out from now on? Learned from the steps so far: what they kept, copied, and took.

Owns what is asked of the next layout. Every answer is right for the result; only the time differs. Replicas learn
nothing that each would find out at another step (see replicas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from bagua_core.fused_optimizer.block import Block
from bagua_core.fused_optimizer.cut_or_not import CutOrNot
from bagua_core.fused_optimizer.replicas import is_alone


class LayoutChoice:
    """cuts_stateless, cuts_states: whether large parameters are cut, without states and with. gradients_stay: whether
    the script keeps them from step to step, as far as compiled blocks go by it.

    cutting: whether those with states are; always if None. alone: whether no other process steps copies of these
    parameters."""

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
        """What the optimizer keeps for a parameter may be another thing from now on."""
        self.cuts_stateless = True

    def learn(self, stepped: Sequence[Block], compiled: bool) -> bool:
        """After a step on these blocks. Returns whether they are better laid out anew."""
        anew = compiled and self._alone() and self._learn_gradients(stepped)
        if self.cuts_stateless and any(len(block.pieces) > 1 and block.is_stateless for block in stepped):
            self.cuts_stateless = False  # what passes over memory once gains nothing from the cache
            return True
        return anew

    def _learn_gradients(self, stepped: Sequence[Block]) -> bool:
        """Compiled blocks are larger where large gradients need not be copied to come together."""
        copies = any(block.copies_what_stays for block in stepped)
        if self._stay is False and not copies and all(block.gradients_stay for block in stepped):
            self._stay = True
            return True
        if self._stay and (copies or any(block.gradients_stay is False for block in stepped)):
            self._stay = None
            return True
        return False

    def took(self, seconds: float, stepped: Sequence[Block]) -> bool:
        """The whole of a step that was not compiled. Returns whether it is better laid out anew. Only those count in
        which all of the parameters that are cut or not had gradients."""
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
