"""Writes this process's log to standard error as plain text: its lines may contain text of other processes."""

from __future__ import annotations

import logging
import sys

from bagua_agent.base.plain_text import plain_lines


class PlainFormatter(logging.Formatter):
    """A record's message and its traceback, with control characters escaped and later lines indented."""

    def format(self, record: logging.LogRecord) -> str:
        return plain_lines(super().format(record))


def log_to_stderr(level: int, prefix: str = "") -> None:
    """Sends what this process logs at `level` and above to standard error, unless its log goes somewhere already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(f"{prefix}%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
