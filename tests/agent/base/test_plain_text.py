"""Nothing that a terminal acts on is left in what is shown, and nothing else is changed."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.base.plain_text import (
    RESET,
    duration,
    first_of,
    listed,
    plain_bytes,
    plain_line,
    plain_lines,
    some,
    unfinished,
)

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
PIECES = st.sampled_from(
    [
        "\x1b[31m",
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x9b2J",
        "\u202e",
        "\r",
        "\n",
        "\x1b",
        "[31m",
        "\udcff",
        "ü",
        "→",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=5)).map("".join)


def acts_on_a_terminal(text: str) -> bool:
    """By Unicode's own categories: controls, surrogates, and marks of direction."""
    left = COLOUR.sub("", text).replace("\t", "")
    directions = ("RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI")
    return any(
        unicodedata.category(c) in ("Cc", "Cs") or unicodedata.bidirectional(c) in directions for c in left
    )


@given(TEXTS)
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    shown = plain_line(text)
    assert not acts_on_a_terminal(shown)
    assert "\x1b" not in shown or shown.endswith(RESET), "colours end with the line"
    raw = plain_bytes(text.encode("utf-8", "surrogateescape" if "\udcff" in text else "surrogatepass"))
    assert not acts_on_a_terminal(raw.decode().replace("\n", "").replace("\r", ""))


@given(st.text(st.characters(categories=["L", "N", "P", "S", "M", "Zs"])))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert plain_line(text) == text and plain_bytes(text.encode()) == text.encode()


@given(TEXTS.map(lambda t: t.encode("utf-8", "surrogatepass")) | st.binary(), st.data())
def test_bytes_in_pieces_are_shown_as_the_whole(data: bytes, draw: st.DataObject) -> None:
    pieces, start = list[bytes](), 0
    for cut in [*sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=4))), len(data)]:
        pieces.append(data[start:cut])
        start = max(start, cut)
    shown, rest = b"", b""
    for piece in pieces:
        rest += piece
        length = unfinished(rest)
        assert length < 40
        shown += plain_bytes(rest[: len(rest) - length])
        rest = rest[len(rest) - length :]
    assert shown + plain_bytes(rest) == plain_bytes(data)


def test_lines_after_the_first_pass_for_none_of_ours() -> None:
    forged = "failed: x\nbagua 12:00:00 n0 | job demo succeeded\r"
    assert plain_lines(forged) == "failed: x\n    bagua 12:00:00 n0 | job demo succeeded\\r"
    assert plain_lines("join with:\n    bagua-launch") == "join with:\n    bagua-launch"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("user\u202egnp.exe", r"user\u202egnp.exe"),
        ("50%\r100%", r"50%\r100%"),
        ("\x1b[1;31mred", "\x1b[1;31mred\x1b[0m"),
        ("a\tb", "a\tb"),
    ],
)
def test_what_is_shown_instead(text: str, shown: str) -> None:
    assert plain_line(text) == shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0124, "12 ms"),
        (3.25, "3.2 s"),
        (54.4, "54 s"),
        (720.0, "12 min"),
        (11_100.0, "3 h 5 min"),
        (1e300, "years"),
        (float("inf"), "years"),
        (float("nan"), "years"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((3, 4), "3, 4"), ((3, 4, 5), "3 to 5"), ((0, 1, 4, 7), "0, 1, 4, 7")],
)
def test_lists_of_numbers(numbers: tuple[int, ...], text: str) -> None:
    assert listed(numbers) == text


def test_what_is_left_out_is_counted_in_one_way() -> None:
    names = [f"n{i}" for i in range(10)]
    assert some(names[:3], 3, what="nodes") == "n0, n1, n2" and first_of(names[:3], 3) == ["n0", "n1", "n2"]
    assert some(names, 2, " and ", "nodes") == "n0 and n1 and 8 more nodes"
    assert first_of(names, 2, "like that") == ["n0", "n1", "and 8 more like that"]
    assert first_of(iter(names)) == [*names[:8], "and 2 more"] and first_of([]) == []
