"""Cutting into lines loses nothing, whatever the bytes and wherever the chunks end."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.workers.output.stream_lines import MAX_LINE_BYTES, TAIL_LINE_BYTES, LineCutter, Segment, Tail


def cut(*chunks: bytes) -> list[Segment]:
    cutter = LineCutter()
    return [segment for chunk in chunks for segment in cutter.feed(chunk)] + cutter.flush(at_end=True)


@pytest.mark.parametrize(
    ("chunks", "segments"),
    [
        ((b"a\nb\n",), [(b"a", b"\n"), (b"b", b"\n")]),
        ((b"a", b"b\n", b"c"), [(b"ab", b"\n"), (b"c", b"")]),
        ((b"a\r", b"\nb"), [(b"a", b"\n"), (b"b", b"")]),
        ((b"a\r\r\n",), [(b"a", b"\n")]),
        ((b"\r10%", b"\r20%\n"), [(b"", b"\r"), (b"10%", b"\r"), (b"20%", b"\n")]),
        ((b"\n\n",), [(b"", b"\n"), (b"", b"\n")]),
        ((b"a\r",), [(b"a", b"\r")]),
    ],
)
def test_cut(chunks: tuple[bytes, ...], segments: list[tuple[bytes, bytes]]) -> None:
    assert [(segment.text, segment.end) for segment in cut(*chunks)] == segments


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"\r", b"\n", b"\r\n", b"x"])))
def test_chunks_do_not_matter(chunks: list[bytes]) -> None:
    assert cut(*chunks) == cut(b"".join(chunks))
    text = b"".join(segment.text for segment in cut(*chunks))
    assert text == b"".join(chunks).replace(b"\r", b"").replace(b"\n", b"")


def test_endless_line_is_given_out_in_pieces() -> None:
    cutter = LineCutter()
    given_out = sum(len(s.text) for _ in range(100) for s in cutter.feed(b"x" * 1000))
    assert 100_000 - given_out <= MAX_LINE_BYTES


def test_tail() -> None:
    tail = Tail()
    for segment in cut(b"".join(b"line %d\n" % n for n in range(100)) + b"\r10%\r20%\r30%\nlast"):
        tail.add(segment)
    lines = tail.text().splitlines()
    assert len(lines) == 20
    assert lines[-3:] == ["line 99", "30%", "last"]


def test_tail_is_bounded_and_joins_pieces() -> None:
    tail = Tail()
    for _ in range(1000):
        tail.add(Segment(b"\xff" * 1000, b""))
    tail.add(Segment(b"end", b"\n"))
    tail.add(Segment(b"next", b"\n"))
    first, second = tail.text().splitlines()
    assert (len(first), second) == (TAIL_LINE_BYTES, "next")


def test_a_flood_of_carriage_returns_is_cut_in_time_that_grows_with_its_length() -> None:
    cutter = LineCutter()
    began_s = time.process_time()
    for _ in range(16):
        cutter.feed(b"\r" * (64 << 10))
    assert time.process_time() - began_s < 2.0  # it took most of a minute for each
    assert cutter.feed(b"x\n") == [Segment(b"x", b"\n")]
