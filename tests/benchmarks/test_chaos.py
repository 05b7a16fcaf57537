"""A short run of faults of all kinds: it keeps all promises, says what it did, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks import chaos, chaos_leaks
from benchmarks.chaos_schedule import schedule
from tests.docs.printed import printed
from tests.lab import namespaces

SEED, EVENTS, EVERY_S = 3, 12, 1.5
SCRIPT = "--step-s 0.06 --least-steps 400"  # by then the loss is a third of its target


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_a_short_run_keeps_all_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module, *words = printed("benchmarks/README.md", "--events 12")[1:]
    assert module == "benchmarks.chaos" and words == [
        *("--events", str(EVENTS), "--seed", str(SEED), "--every", str(EVERY_S))
    ]
    code = chaos.main([*words, "--script", SCRIPT, "--logs", str(tmp_path / "logs")])
    done = capsys.readouterr()
    assert code == 0, f"{done.out}\n{done.err}\n{_logs(tmp_path)}"
    assert "all promises kept" in done.out
    for event in schedule(SEED, EVENTS, EVERY_S):
        assert f"{event} -> " in done.err, "the event happened"
    assert [p.name for p in tmp_path.iterdir()] == ["logs"], "its directory is gone"


def _logs(directory: Path) -> str:
    return "\n".join(f"---- {p.name}\n{p.read_text(errors='replace')}" for p in directory.rglob("terminal-*"))


def test_files_that_are_leaks(tmp_path: Path) -> None:
    log = tmp_path / "bagua-log" / "job" / "slot0"
    log.mkdir(parents=True)
    (log / "stderr.log").write_text("why it ended")
    (tmp_path / "torchinductor_somebody").mkdir()
    assert chaos_leaks.of_files(tmp_path) == []
    assert chaos_leaks.of_files(tmp_path / "missing") == []
    (tmp_path / "bagua-empty").mkdir()
    runtime = tmp_path / "bagua-runtime"
    (runtime / "store").mkdir(parents=True)
    (runtime / "store" / "data").write_text("")
    found = chaos_leaks.of_files(tmp_path)
    assert len(found) == 2 and "bagua-empty (empty)" in found[0] and "bagua-runtime" in found[1]
