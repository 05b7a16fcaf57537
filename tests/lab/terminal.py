"""A terminal of the tests: a program runs on it, and what a person would see is read row by row.

It knows the control sequences that Bagua's programs write; any other fails. A row that is too long wraps, and is
counted.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import termios
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from bagua_agent.base.readable import readable
from tests.lab.wait import HANG_S, eventually

TOKEN = re.compile(r"\x1b\[(?P<private>\??)(?P<number>\d*)(?P<kind>[A-Za-z])|[\r\n]|[^\x00-\x1f\x7f]")


class Screen:
    """Rows of characters, a cursor, and another screen beside it."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.rows = self._empty()
        self.row = self.column = 0
        self.wraps = 0
        self.has_cursor = True
        self.main: tuple[list[list[str]], int, int] | None = None  # while the other screen is shown

    def _empty(self) -> list[list[str]]:
        return [[" "] * self.columns for _ in range(self.lines)]

    @property
    def text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.rows).rstrip()

    def resize(self, columns: int, lines: int) -> None:
        """As xterm does: rows are cut, or get room."""
        self.columns, self.lines = columns, lines
        rows = [[*row, *" " * columns][:columns] for row in self.rows]
        self.rows = [*rows, *self._empty()][:lines]
        self.row, self.column = min(self.row, lines - 1), min(self.column, columns)

    def write(self, text: str) -> str:
        """What is left of `text`: a sequence whose end has not come yet."""
        at = 0
        while at < len(text):
            token = TOKEN.match(text, at)
            if token is None:
                assert text[at] == "\x1b" and len(text) - at < 12, f"unknown: {text[at : at + 20]!r}"
                break
            at = token.end()
            if token["kind"]:
                self._control(token["private"], token["number"], token["kind"])
            else:
                self._character(token[0])
        return text[at:]

    def _character(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._next_row()
        else:
            width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            # Only now: a full row keeps the cursor on its last character
            if self.column + width > self.columns:
                self.wraps += 1
                self.column = 0
                self._next_row()
            self.rows[self.row][self.column : self.column + width] = [character, *[""] * (width - 1)]
            self.column += width

    def _next_row(self) -> None:
        self.row += 1
        if self.row == self.lines:
            self.rows = [*self.rows[1:], [" "] * self.columns]
            self.row -= 1

    def _control(self, private: str, number: str, kind: str) -> None:
        on = min(self.column, self.columns - 1)
        match private + number + kind:
            case "H":
                self.row = self.column = 0
            case "K":
                self.rows[self.row][on:] = [" "] * (self.columns - on)
            case "2K":
                self.rows[self.row] = [" "] * self.columns
            case "J":
                self.rows[self.row][on:] = [" "] * (self.columns - on)
                self.rows[self.row + 1 :] = self._empty()[self.row + 1 :]
            case "?25h" | "?25l":
                self.has_cursor = kind == "h"
            case "?1049h":
                self.main = self.rows, self.row, self.column
                self.rows = self._empty()
            case "?1049l":
                assert self.main is not None, "the other screen was not shown"
                (self.rows, self.row, self.column), self.main = self.main, None
                self.resize(self.columns, self.lines)
            case other:
                raise AssertionError(f"the terminal of the tests does not know {other!r}")


class Terminal:
    """Use as a context: its program and its descriptors end with it."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], columns: int, lines: int) -> None:
        self.screen = Screen(columns, lines)
        self._rest = ""
        self._primary, self._secondary = pty.openpty()
        termios.tcsetwinsize(self._secondary, (lines, columns))
        self.modes = termios.tcgetattr(self._secondary)
        shell = 'printf "before\\n"; exec "$0" "$@"'  # what the terminal showed before the program
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "sh", "-c", shell, *words],
            env=dict(env), stdin=self._secondary, stdout=self._secondary, stderr=self._secondary,
        )  # fmt: skip

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        os.close(self._secondary)
        os.close(self._primary)

    def read(self, wait_s: float = 0.0) -> str:
        """What the screen shows after all that was written until now."""
        while readable([self._primary], wait_s):
            self._rest = self.screen.write(self._rest + os.read(self._primary, 65536).decode())
            wait_s = 0.0
        return self.screen.text

    def await_text(self, found: Callable[[str], object], what: str, deadline_s: float) -> str:
        """The first screen of which `found` is true."""

        def looked() -> str:
            text = self.read(0.05)
            return text if found(text) else ""

        return eventually(looked, deadline_s, lambda: f"{what}; the screen shows\n{self.screen.text}")

    def type(self, keys: bytes) -> None:
        os.write(self._primary, keys)

    def resize(self, columns: int, lines: int) -> None:
        """The program gets SIGWINCH."""
        self.read()
        self.screen.resize(columns, lines)
        termios.tcsetwinsize(self._primary, (lines, columns))

    def end(self) -> int:
        """The program's exit code, once it has ended."""
        eventually(lambda: (self.read(0.05), self.process.poll() is not None)[1], HANG_S, "the program ends")
        self.read()
        return self.process.wait(HANG_S)

    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._secondary)
