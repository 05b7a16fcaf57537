"""Parses the interval of checkpoints: "500" is every 500 steps, "30s" every 30 seconds.

The one codec of that setting: the launcher parses the user's value with it, the core the agent's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"([0-9]{1,9})|([0-9]{1,9}(?:\.[0-9]{1,6})?)s")


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """The interval of checkpoints. Exactly one of the two is set, and above 0."""

    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.seconds > 0) or self.steps < 0 or self.seconds < 0:
            raise ValueError(f"{self.steps} steps and {self.seconds:g} s: not one of the two, above 0")

    def encode(self) -> str:
        return str(self.steps) if self.steps else f"{self.seconds:.6f}".rstrip("0").rstrip(".") + "s"

    @staticmethod
    def decode(text: str) -> CheckpointEvery:
        """Parses a number of steps, or of seconds with an s. Raises ValueError for anything but a number above 0."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is neither a number of steps nor one of seconds, as 500 or 30s")
        return CheckpointEvery(steps=int(match[1])) if match[1] else CheckpointEvery(seconds=float(match[2]))
