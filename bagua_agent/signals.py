"""Turns signals into messages, and puts the old handlers back afterwards."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from bagua_agent.errors import UserError


class SignalsToInbox:
    """Within the block, each of `names` calls `tell` with its number. From the main thread only.

    first: the first that came, for what runs before anybody reads messages.
    """

    def __init__(self, names: Sequence[str], tell: Callable[[int], None]) -> None:
        self._numbers = [_number(name) for name in names]
        self._tell = tell
        self._before: dict[int, Any] = {}
        self.first: int | None = None

    def __enter__(self) -> SignalsToInbox:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = number
        self._tell(number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _number(name: str) -> int:
    try:
        return signal.Signals[name.strip().upper()].value
    except KeyError:
        raise UserError(
            f"--signals-to-handle names {name!r}, which is no signal here; use names such as SIGTERM,SIGINT"
        ) from None
