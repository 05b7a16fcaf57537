"""Ledger files with anything in them: what is no line is counted as torn, and `check` says what is wrong."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bagua_core.elastic.ledger.ledger import LedgerLine, Resumption
from tests.lab import ledger

FUZZ = settings(
    max_examples=100,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
GOOD = LedgerLine(1.0, 1, 1, 0, 1, 0, (0, 1)).encode()
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.integers() | st.text(max_size=2) | st.lists(st.integers(), max_size=1), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)
)


def read_of(directory: Path, *pieces: bytes) -> ledger.Ledger:
    (directory / "w.jsonl").write_bytes(b"".join(pieces))
    return ledger.read(directory)


@given(junk=st.binary(max_size=100))
@FUZZ
def test_bytes_that_are_no_lines(tmp_path: Path, junk: bytes) -> None:
    found = read_of(tmp_path, GOOD, junk, b"\n", GOOD)
    assert [(x.generation, x.step, x.global_rank) for x in found.lines] == [(1, 1, 0)]
    assert found.torn == sum(1 for text in junk.split(b"\n") if text)


@given(values=st.dictionaries(st.sampled_from([*LedgerLine.__slots__, "other"]), VALUES, max_size=8))
@FUZZ
def test_values_of_any_kind(tmp_path: Path, values: dict[str, object]) -> None:
    """A line is whole and of the right kinds, or it is torn."""
    whole = {**json.loads(GOOD), **values}
    found = read_of(tmp_path, GOOD, json.dumps(whole).encode() + b"\n")
    assert len(found.lines) + len(found.conflicts) + found.torn >= 1
    found.check(2, 1)


@given(values=st.dictionaries(st.sampled_from([*Resumption.__slots__, "other"]), VALUES, max_size=5))
@FUZZ
def test_a_resumption_with_values_of_any_kind(tmp_path: Path, values: dict[str, object]) -> None:
    whole = {**json.loads(Resumption(1.0, "j", 1, 1, 0).encode()), **values}
    found = read_of(tmp_path, GOOD, json.dumps(whole).encode() + b"\n")
    assert len(found.resumptions) + found.torn == 1
    found.check(2, 1)


@given(cut=st.integers(0, len(GOOD)), at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255))
@FUZZ
def test_a_line_with_a_byte_changed_and_one_cut(tmp_path: Path, cut: int, at: int, byte: int) -> None:
    changed = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    read_of(tmp_path, changed, b"\n", GOOD[:cut]).check(2, 1)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"time":' + b"9" * 10_000 + b"}", b"null", b'"x"', b"\x00", b"\xff\xfe"]
)
def test_what_a_reader_of_json_stumbles_over(tmp_path: Path, text: bytes) -> None:
    found = read_of(tmp_path, GOOD, text, b"\n")
    assert (len(found.lines), found.torn) == (1, 1)


def test_a_world_of_any_size_is_not_counted_out(tmp_path: Path) -> None:
    """A line that speaks of a million workers must not make its reader list them."""
    line = json.loads(GOOD) | {"world_size": 1 << 20}
    found = read_of(tmp_path, json.dumps(line).encode() + b"\n")
    tracemalloc.start()
    try:
        wrong = found.check(2, 1)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert wrong and len(wrong[0]) < 10_000
