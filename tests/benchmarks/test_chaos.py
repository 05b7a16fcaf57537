"""A short run of faults of all kinds: it keeps all promises, says what it did, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import chaos_leaks
from benchmarks.chaos_schedule import schedule
from benchmarks.result_file import ROOT
from tests.lab import namespaces

SEED, EVENTS, EVERY_S = 3, 12, 1.5
DEADLINE_S = 200.0


def test_a_short_run_keeps_all_promises(tmp_path: Path) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    words = [sys.executable, "-m", "benchmarks.chaos", "--seed", str(SEED), "--events", str(EVENTS)]
    words += ["--every", str(EVERY_S), "--logs", str(tmp_path / "logs")]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    env = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{_logs(tmp_path)}"
    assert "all promises kept" in done.stdout
    for event in schedule(SEED, EVENTS, EVERY_S):
        assert f"{event} -> " in done.stderr, "the event happened"
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
