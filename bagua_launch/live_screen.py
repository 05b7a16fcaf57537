"""Shows lines on the terminal's other screen, each look in place of the one before, until the key q.

Leaves the terminal as it was: its text, its cursor and its echo, also after SIGTERM. Knows nothing of jobs.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import click

from bagua_agent.base.readable import readable

_UNKNOWN_SIZE = os.terminal_size((80, 24))  # of a terminal that does not know it, as a serial line


class LiveScreen:
    def __init__(self, keys: int | None) -> None:
        self._keys = keys  # the terminal's descriptor; None: stdin is no terminal

    @property
    def size(self) -> os.terminal_size:
        """The size of the terminal as it is now. A variable COLUMNS of the environment does not follow a resize."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return found if found.columns and found.lines else _UNKNOWN_SIZE

    def show(self, lines: Sequence[str], height: int) -> None:
        """Shows at most `height` lines, none longer than a row."""
        # each row is erased before it is written: behind a full row, the cursor is still on its last character
        text = "\x1b[H" + "\n".join(f"\x1b[2K{line}" for line in lines)
        click.echo(text + ("\n\x1b[J" if len(lines) < height else ""), nl=False)

    def quits_within(self, seconds: float) -> bool:
        """Returns True once q is pressed; False after that time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._keys is None:
                time.sleep(left_s)
            elif readable([self._keys], left_s):
                pressed = os.read(self._keys, 64)
                if b"q" in pressed:
                    return True
                if not pressed:  # the terminal is gone
                    self._keys = None
        return False


@contextmanager
def live_screen() -> Iterator[LiveScreen]:
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    modes = None if keys is None else termios.tcgetattr(keys)
    handler = signal.signal(signal.SIGTERM, _exit)
    try:
        if keys is not None:
            tty.setcbreak(keys)  # a key comes at once and is not shown; Ctrl-C still interrupts
        click.echo("\x1b[?1049h\x1b[?25l", nl=False)
        yield LiveScreen(keys)
    finally:
        click.echo("\x1b[?25h\x1b[?1049l", nl=False)
        if keys is not None and modes is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, modes)
        signal.signal(signal.SIGTERM, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
