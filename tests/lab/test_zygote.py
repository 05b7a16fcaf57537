"""The zygote starts what several threads of a test ask for at once."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab import zygote


def test_an_end_that_several_threads_await(tmp_path: Path) -> None:
    """Each gets the exit code, whichever reaps the process."""
    line = (sys.executable, "-m", "json.tool", "--compact", os.devnull)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": zygote._environment()["PYTHONPATH"]}
    with ThreadPoolExecutor(8) as threads:
        for number in range(20):
            process = zygote.start(line, environment, tmp_path / f"out-{number}", str(tmp_path), None)
            assert list(threads.map(lambda _, p=process: p.wait(60.0), range(8))) == [1] * 8


def test_requests_from_several_threads(tmp_path: Path) -> None:
    line = (sys.executable, "-m", "json.tool", "--compact")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": zygote._environment()["PYTHONPATH"]}
    assert zygote.can_start(line, environment) and zygote.module_of(line, environment)
    numbers = [f"[{number}]" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        runs = threads.map(lambda n: zygote.run_captured(line, environment, tmp_path, n, 60.0), numbers)
        assert [(run.returncode, run.stdout.strip(), run.stderr) for run in runs] == [
            (0, n, "") for n in numbers
        ]
