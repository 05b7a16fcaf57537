"""Writes this process's log to standard error as plain text: its lines may contain text of other processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bagua_agent.base.plain_text import plain_lines


class PlainFormatter(logging.Formatter):
    """A record's message and its traceback, with control characters escaped and later lines indented."""

    def format(self, record: logging.LogRecord) -> str:
        return plain_lines(super().format(record))


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to standard error.

    say: takes the text instead, so that no thread that logs waits for a reader of standard error. Where it returns
    False the text is written here.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.say: Callable[[str], bool] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            said = self.say is not None and self.say(self.format(record))
        except Exception:  # noqa: BLE001 (as in every handler of logging: a record that can't be formatted)
            self.handleError(record)
            return
        if not said:
            super().emit(record)


def log_to_stderr(level: int, prefix: str = "") -> None:
    """Sends what this process logs at `level` and above to standard error, unless its log goes somewhere already."""
    handler = StderrHandler()
    handler.setFormatter(PlainFormatter(f"{prefix}%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def log_through(say: Callable[[str], bool]) -> Iterator[None]:
    """Within the block, `say` gets what log_to_stderr would write. It must not wait; it returns False if it can print
    nothing."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, StderrHandler)]
    for handler in handlers:
        handler.say = say
    try:
        yield
    finally:
        for handler in handlers:
            handler.say = None
