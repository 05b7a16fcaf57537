"""Ledgers read back what was written, whatever the disk did, and name what is wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_core.elastic.ledger import ledger as module
from bagua_core.elastic.ledger.ledger import LedgerLine, LedgerWriter, Resumption
from tests.lab.ledger import Ledger, decode_line, read
from tests.lab.wait import HANG_S


def line(
    step: int, global_rank: int, samples: list[int], generation: int = 1, world: int = 2, epoch: int = 0
) -> LedgerLine:
    return LedgerLine(1.5, generation, step, global_rank, world, epoch, tuple(samples))


WHOLE = [line(0, 0, [0, 1]), line(0, 1, [2]), line(1, 0, [3, 4, 5], generation=2, world=1)]


def no_error(text: str) -> None:
    raise AssertionError(text)


def test_written_lines_are_read_back_once(tmp_path: Path) -> None:
    first = LedgerWriter(tmp_path, "node-0/a", no_error)
    second = LedgerWriter(tmp_path, "b", no_error)
    for entry in WHOLE:
        first.write(entry)
    second.write(WHOLE[1])  # a survivor wrote it too
    first.close()
    second.close()
    ledger = read(tmp_path)
    assert ledger.lines == tuple(WHOLE)
    assert ledger.steps == 2
    assert ledger.check(6, 1) == []


def test_a_torn_line_is_counted_and_what_follows_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(WHOLE[0].encode() + WHOLE[1].encode()[:20])
    assert read(tmp_path).torn == 1
    writer = LedgerWriter(tmp_path, "a", no_error)
    writer.write(WHOLE[1])
    writer.write(WHOLE[2])
    writer.close()
    ledger = read(tmp_path)
    assert ledger.lines == tuple(WHOLE) and ledger.torn == 1
    assert ledger.check(6, 1) == []


def test_a_full_disk_is_said_once_and_never_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer = LedgerWriter(tmp_path, "a", said.append)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(descriptor: int, data: bytes) -> int:
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(module.os, "write", full)
    writer.write(WHOLE[0])
    monkeypatch.setattr(module.os, "write", half)
    writer.write(WHOLE[0])
    monkeypatch.setattr(module.os, "write", real)
    for entry in WHOLE:
        writer.write(entry)
    writer.close()
    writer.write(WHOLE[0])
    assert len(said) == 1 and "No space left" in said[0] and "a.jsonl" in said[0]
    assert read(tmp_path).lines == tuple(WHOLE)


def test_a_directory_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    writer = LedgerWriter(tmp_path / "file", "a", said.append)
    writer.write(WHOLE[0])
    writer.close()
    assert len(said) == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (WHOLE[:2], "3 of 6 samples were never used (not used: 3, 4, 5)"),
        ([*WHOLE[:2], line(1, 0, [2, 3, 4, 5], 2, 1)], "sample 2 was used in steps 0 and 1"),
        ([WHOLE[0], WHOLE[2]], "global ranks [1] are missing"),
        ([*WHOLE, line(1, 0, [3, 4, 5], 3, 1)], "step 1 was committed in generations [2, 3]"),
        ([*WHOLE, line(0, 1, [5])], "written twice with different contents"),
        ([*WHOLE[:2], line(2, 0, [3, 4, 5], 2, 1)], "steps 1..1 are missing"),
        ([WHOLE[0], line(0, 1, [2], world=3), WHOLE[2]], "world sizes [2, 3] do not agree"),
        ([*WHOLE, line(2, 0, [6], 1, 1, 1)], "earlier generation"),
        ([*WHOLE, line(2, 0, [6], 2, 1, 1)], "sample 6 is not in the data set"),
        ([WHOLE[0], line(0, 1, [2], epoch=1), WHOLE[2]], "different epochs"),
        ([*WHOLE, line(2, 2, [], 2, 2)], "[2] are not of it"),
    ],
)
def test_violations_are_named(lines: list[LedgerLine], words: str) -> None:
    found = Ledger.of(lines).check(6, 1)
    assert any(words in text for text in found), found


def test_drop_last_and_an_epoch_under_way(tmp_path: Path) -> None:
    lines = [*WHOLE, line(2, 0, [4, 2], 2, 1, epoch=1)]
    assert Ledger.of(lines).check(7, 1, samples_per_epoch=6) == []
    assert Ledger.of(lines).check(7, 1) != []
    assert Ledger.of(lines).check(7, 1, samples_per_epoch=5) != []


def test_many_violations_are_cut_short() -> None:
    lines = [line(0, 0, [0] * 500, world=1)]
    found = Ledger.of(lines).check(1, 1)
    assert len(found) == 101 and "more" in found[-1]


def test_ledger_needs_no_torch() -> None:
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('ledger', {module.__file__!r})\n"
        "loaded = importlib.util.module_from_spec(spec)\n"
        "sys.modules['ledger'] = loaded\n"
        "spec.loader.exec_module(loaded)\n"
        "assert 'torch' not in sys.modules and 'bagua_core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)


def of(job: str, step: int, generation: int = 1, samples: tuple[int, ...] | None = None) -> LedgerLine:
    return LedgerLine(1.5, generation, step, 0, 1, 0, (step,) if samples is None else samples, job)


def test_lines_after_the_step_from_which_a_later_run_went_on_are_void(tmp_path: Path) -> None:
    """Each start is a job with generations of its own, and clocks that go backwards prove nothing."""
    first = LedgerWriter(tmp_path, "a", no_error)
    first.write(Resumption(9.0, "one", 1, 1, 0))
    for step in range(1, 6):
        first.write(of("one", step, generation=3 if step > 2 else 1))
    second = LedgerWriter(tmp_path, "b", no_error)
    second.write(Resumption(5.0, "two", 1, 2, 3))
    second.write(of("two", 4))
    second.write(of("two", 5))
    third = LedgerWriter(tmp_path, "c", no_error)
    other = LedgerWriter(tmp_path, "d", no_error)
    for writer in (third, other):
        writer.write(Resumption(1.0, "three", 1, 3, 4))  # every rank says so
    third.write(of("three", 5))
    third.write(of("three", 6, generation=2))
    for writer in (first, second, third, other):
        writer.close()
    ledger = read(tmp_path)
    assert [(x.job, x.step) for x in ledger.lines] == [
        ("one", 1), ("one", 2), ("one", 3), ("two", 4), ("three", 5), ("three", 6),
    ]  # fmt: skip
    assert {(x.job, x.step) for x in ledger.voided} == {("one", 4), ("one", 5), ("two", 5)}
    assert [r.run for r in ledger.resumptions] == [1, 2, 3]
    assert ledger.check(7, 1) == ["epoch 0: 1 of 7 samples were never used (not used: 0)"]
    assert ledger.torn == 0


def test_generations_of_the_same_job_that_went_on_from_a_checkpoint() -> None:
    starts = [Resumption(1.0, "one", 1, 1, 0), Resumption(2.0, "one", 4, 2, 1)]
    lines = [of("one", 1), of("one", 2), of("one", 3, 2), of("one", 2, 4), of("one", 3, 5)]
    ledger = Ledger.of(lines, 0, starts)
    assert [(x.generation, x.step) for x in ledger.lines] == [(1, 1), (4, 2), (5, 3)]
    assert len(ledger.voided) == 2


def test_a_run_that_began_anew_undoes_all() -> None:
    starts = [Resumption(1.0, "one", 1, 1, 0), Resumption(2.0, "two", 1, 2, 0)]
    ledger = Ledger.of([of("one", 1), of("one", 2), of("two", 1)], 0, starts)
    assert [x.job for x in ledger.lines] == ["two"]


def test_without_a_resumption_two_jobs_in_one_directory_are_told() -> None:
    found = Ledger.of([of("one", 1), of("two", 1)]).check(2, 0)
    assert any("step 1" in text for text in found), found


def test_lines_of_before_jobs_were_named_are_read() -> None:
    old = of("", 1).encode().replace(b',"job":""', b"")
    assert b"job" not in old and decode_line(old) == of("", 1)


def test_a_torn_resumption_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(Resumption(1.0, "one", 1, 1, 0).encode()[:-3] + b"\n")
    assert read(tmp_path).torn == 1
