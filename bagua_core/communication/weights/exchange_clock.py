"""Decides when models exchange their weights: at least so many steps after the last exchange.

Owns the step and the number of the last exchange, one tensor that travels with the job's state. Steps of a job are cut
into intervals of equal length; an exchange is due in the first step of an interval that can have it. A step can't if
its forward runs under `no_sync`, and one that the model takes no part in. Knows no peers.
"""

from __future__ import annotations

import torch

STATE = "exchanges"
"""The name of the tensor among those of an algorithm."""


class ExchangeClock:
    def __init__(self, interval: int) -> None:
        self._interval = interval
        # The step of the last exchange, -1: none; and how many there were. Checkpoints of versions without a clock
        # leave it so: the first step exchanges.
        self.tensor = torch.tensor([-1, 0], dtype=torch.int64, device="cpu")

    def is_due(self, step: int) -> bool:
        return step // self._interval > int(self.tensor[0]) // self._interval

    @property
    def count(self) -> int:
        """The number of exchanges so far."""
        return int(self.tensor[1])

    def exchanged(self, step: int) -> None:
        self.tensor.copy_(torch.tensor([step, self.count + 1], dtype=torch.int64, device="cpu"))
