"""The place in which a background operation is tried: the error that it meets, and the events that come of it."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 10.0

Events = queue.SimpleQueue[object]


class Place:
    """What an operation is driven with. fail: raises the error, whatever it is called with; events: what came of it."""

    def __init__(self, error: BaseException, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.error = error
        self.patch = monkeypatch.setattr
        self.directory = directory
        self.events: Events = queue.SimpleQueue()
        self.met = 0

    def fail(self, *arguments: object, **keywords: object) -> Any:
        self.met += 1
        raise self.error

    def one_event(self) -> None:
        self.events.get(timeout=DEADLINE_S)
