"""How are parameters stepped for which blocks are of no use? With foreach=True for that step, where nobody can tell.

torch's default on a CPU is one parameter after the other, which costs several times as much where parameters are small.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from bagua_core.fused_optimizer.options import switches

_NAME = "foreach"


class ForeachStep:
    """same(optimizer, group): whether that group's step gives the same bits with foreach=True."""

    def __init__(self, same: Callable[[torch.optim.Optimizer, int], bool]) -> None:
        self._same = same
        self._known: dict[Hashable, bool] = {}
        self._changed: list[dict[str, Any]] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Only groups whose script has left the option open."""
        for number, group in enumerate(optimizer.param_groups):
            if group.get(_NAME, False) is None and self._is_same(optimizer, number):
                group[_NAME] = True
                self._changed.append(group)

    def end(self) -> None:
        """The step is over, or raised; also called where none was begun."""
        for group in self._changed:
            group[_NAME] = None
        self._changed.clear()

    def _is_same(self, optimizer: torch.optim.Optimizer, number: int) -> bool:
        key = switches(optimizer.param_groups[number])
        if key not in self._known:
            self._known[key] = self._same(optimizer, number)
        return self._known[key]
