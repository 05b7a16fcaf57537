"""The live view of a ledger, while lines are written and half written."""

from __future__ import annotations

from pathlib import Path

from bagua_core.elastic.ledger.ledger import LedgerLine, Resumption
from benchmarks.committed_steps import LiveLedger


def line(step: int, time: float, global_rank: int = 0, generation: int = 1) -> bytes:
    return LedgerLine(time, generation, step, global_rank, 2, 0, [step], "job").encode()


def test_it_reads_on_and_keeps_the_first_time(tmp_path: Path) -> None:
    live = LiveLedger(tmp_path)
    live.read_on()
    assert (live.in_order, live.newest_step) == ([], 0)
    first = tmp_path / "h1-a.0.1.jsonl"
    first.write_bytes(Resumption(9.0, "job", 1, 0, 0).encode() + line(1, 10.0) + line(2, 11.0)[:20])
    live.read_on()
    assert [s.step for s in live.in_order] == [1]
    with first.open("ab") as stream:
        stream.write(line(2, 11.0)[20:])
    (tmp_path / "h2-b.0.1.jsonl").write_bytes(line(1, 9.5, 1) + line(2, 11.5, 1))
    live.read_on()
    live.read_on()
    assert [(s.step, s.time_s) for s in live.in_order] == [(1, 9.5), (2, 11.0)]
    assert live.newest_step == 2
    assert {name: (w.first_s, w.newest_step) for name, w in live.workers.items()} == {
        "h1-a.0.1": (10.0, 2),
        "h2-b.0.1": (9.5, 2),
    }
