"""Makes text of unknown origin safe on a terminal: plain characters and colours stay, the rest is escaped. Pure.

Text reaches a terminal from workers, submissions, other nodes and etcd. What a terminal acts on could rewrite what a
person has read, set the window's title, or make the terminal type on its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LONGEST_TEXT = 400
_LONGEST_SHOWN_S = 1e9  # also for what is no number

# SGR: colours and weights alone, since they change no character and end with the line (`RESET`)
_SGR = r"\x1b\[[0-9;:]{0,32}m"
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_LINES = "\u2028\u2029"  # some readers end a line there
_UNSAFE = re.compile(rf"({_SGR})|[\x00-\x08\x0a-\x1f\x7f-\x9f{_BIDI}{_LINES}\ud800-\udfff\ufeff]")
_LINE_ENDS = re.compile(rb"([\r\n]+)")
_BEGUN_SGR = re.compile(rb"\x1b(\[[0-9;:]{0,32})?\Z")
RESET = "\x1b[0m"


def plain_line(text: str) -> str:
    """Returns the text as one line: control characters, line ends and direction marks are shown as `\\x1b`, `\\n` or
    `\\u202e`."""
    safe = _escaped(text)
    return safe + RESET if has_colour(safe) and not safe.endswith(RESET) else safe


def plain_lines(text: str) -> str:
    """Returns the text as several lines. Those after the first are indented, so that none passes for a message of its
    own."""
    first, *more = map(plain_line, text.split("\n"))
    return "\n".join([first, *(line if line.startswith(" ") else f"    {line}" for line in more)])


def plain_bytes(data: bytes) -> bytes:
    """Returns what a worker wrote, with its line ends and carriage returns; what is no UTF-8 is shown as `\\xff`.
    Colours last until the program that shows it ends them."""
    parts = _LINE_ENDS.split(data)
    parts[::2] = [_escaped(part.decode("utf-8", "backslashreplace")).encode() for part in parts[::2]]
    return b"".join(parts)


def has_colour(text: str) -> bool:
    """Tells whether a text that is plain may leave colours behind."""
    return "\x1b" in text


def _escaped(text: str) -> str:
    return _UNSAFE.sub(
        lambda match: match[1] or match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text
    )


def in_utf8(text: str) -> str:
    """Returns the text for a record, which holds UTF-8 alone: bytes of a name or an argument that are none are shown as
    `\\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def unfinished(data: bytes) -> int:
    """Returns how many bytes at the end of `data` begin a character or a colour that its next bytes may complete."""
    begun = _BEGUN_SGR.search(data, max(0, len(data) - 40))
    if begun:
        return len(data) - begun.start()
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return length if length < needed else 0
        if lead < 0x80:
            return 0
    return 0


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Returns the text, or its first `most` characters and its length, for a record or a line: what others wrote must
    not fill either."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def some(items: Iterable[str], most: int = 8, joint: str = ", ", what: str = "") -> str:
    """Returns the first items, and how many more there are: a line with a thousand names is unreadable. what: goes
    behind "and 5 more"."""
    every = list(items)
    rest = f" {_rest(len(every) - most, what)}" if len(every) > most else ""
    return joint.join(every[:most]) + rest


def first_of(items: Iterable[str], most: int = 8, what: str = "") -> list[str]:
    """Returns the first items, and as a further one how many more there are. what: as of `some`."""
    every = list(items)
    return every if len(every) <= most else [*every[:most], _rest(len(every) - most, what)]


def _rest(number: int, what: str) -> str:
    return f"and {number} more {what}".rstrip()


def listed(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as "0, 1, 4", or as "0 to 4" where they are three or more without a gap."""
    is_range = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if is_range else ", ".join(map(str, numbers))


def counted(number: int, what: str, several: str = "") -> str:
    """Returns a number with its noun, as "1 node", "2 nodes". several: the plural that is made otherwise."""
    return f"{number} {what}" if number == 1 else f"{number} {several or what + 's'}"


def duration(seconds: float) -> str:
    """Describes a duration as "850 ms", "3.2 s", "54 s", "12 min", "3 h 5 min". A worker may report any rate from which
    it follows."""
    if not seconds < _LONGEST_SHOWN_S:
        return "years"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
