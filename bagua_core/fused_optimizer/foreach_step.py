"""Steps parameters for which blocks are of no use, with foreach=True for that step alone; no caller can tell.

torch's default on a CPU is one parameter after the other, which costs several times as much where parameters are small.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

MOST_ELEMENTS = 1 << 24  # of a group: foreach can take memory for a copy of all its gradients
_NAME = "foreach"


class ForeachStep:
    """Sets foreach=True on groups for one step.

    same(optimizer, group): whether that group's step gives the same bits with foreach=True.
    """

    def __init__(self, same: Callable[[torch.optim.Optimizer, int], bool]) -> None:
        self._same = same
        self._known: dict[Hashable, bool] = {}
        self._changed: list[dict[str, Any]] = []

    def begin(self, optimizer: torch.optim.Optimizer, switches: Sequence[Hashable]) -> None:
        """Sets foreach=True where that gives the same bits. switches: of each group, see options.py.

        Only on groups whose script has left the option open, and not where a scaler has the step unscale gradients.
        """
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return
        for number, group in enumerate(optimizer.param_groups):
            is_open = group.get(_NAME, False) is None and not group.get("fused")
            if is_open and self._is_same(optimizer, number, switches[number]):
                group[_NAME] = True
                self._changed.append(group)

    def end(self) -> None:
        """Resets the groups when the step is over, or raised; also called where none was begun."""
        for group in self._changed:
            group[_NAME] = None
        self._changed.clear()

    def _is_same(self, optimizer: torch.optim.Optimizer, number: int, switches: Hashable) -> bool:
        key = number, switches
        if key not in self._known:
            elements = sum(parameter.numel() for parameter in optimizer.param_groups[number]["params"])
            self._known[key] = elements <= MOST_ELEMENTS and self._same(optimizer, number)
        return self._known[key]
