"""bagua.launch: a function, defined anywhere, in the workers of a job on this machine."""

from __future__ import annotations

import errno
import importlib
import io
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

import bagua_core as bagua
from bagua_core import function_launch
from bagua_core.errors import TrainingOver
from bagua_core.function_launch import LEAVE_LIMIT_S, LEAVE_MARGIN_S, LaunchFailed, leave_limit_s
from tests.lab import ledger
from tests.lab.wait import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def checkout_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'protos'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def family() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_results_and_output_come_back_and_a_worker_that_shut_down_trains_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = family()
    scale = 3.0

    def train(last: int, *, lr: float) -> tuple[int, int, float, bool, str]:
        module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        model = bagua.DistributedDataParallel(module, [optimizer])
        loader = bagua.ElasticDataLoader(TensorDataset(torch.ones(16, 1)), 2)
        for number, (x,) in loader.enumerate():
            optimizer.zero_grad()
            (scale * model(x)).mean().backward()
            optimizer.step()
            if number == last:
                break  # the step is under way still
        place = bagua.get_rank(), bagua.get_world_size()
        bagua.shutdown()
        bagua.shutdown()
        print(f"rank {place[0]} has trained")
        try:
            bagua.DistributedDataParallel(module, [optimizer])
        except TrainingOver as error:
            return *place, module.weight.item(), bagua.is_launched(), str(error)
        raise AssertionError("a second training began")

    results = bagua.launch(train, 3, lr=0.5, nproc_per_node=2, options=["--ledger", str(tmp_path / "ledger")])
    assert [result[1:4] for result in results] == [(2, -6.0, True)] * 2
    assert sorted(result[0] for result in results) == [0, 1]
    assert all("bagua.shutdown(), which ends its job" in result[4] for result in results)
    shown = capsys.readouterr().out
    assert "rank 0 has trained" in shown and "rank 1 has trained" in shown
    committed = {(line.step, line.global_rank) for line in ledger.read(tmp_path / "ledger").lines}
    assert committed == set(itertools.product(range(1, 5), range(2)))
    assert family() == before


def test_every_result_comes_back_where_each_worker_has_local_rank_0() -> None:
    def slot() -> str:
        return os.environ["BAGUA_SLOT"]

    assert bagua.launch(slot, nproc_per_node=2, options=["--virtual-local-rank"]) == ["0", "1"]


def test_an_interrupt_stops_the_job_and_shows_what_it_still_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = family()

    def waits() -> None:
        import time

        try:
            (tmp_path / "runs").touch()
            while True:
                time.sleep(0.1)
        finally:
            print("the function has put everything away")

    def interrupt() -> None:
        eventually((tmp_path / "runs").exists, 60, "the function runs", 0.05)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        bagua.launch(waits, nproc_per_node=1)
    watcher.join()
    assert (tmp_path / "runs").exists()
    assert "the function has put everything away" in capsys.readouterr().out
    eventually(lambda: family() <= before, 10, lambda: f"no process left: {family() - before}")


class EndsWithTheInterrupt(io.StringIO):
    """As a pipe to `tee`, which the same Ctrl-C ends."""

    def write(self, text: str) -> int:
        if isinstance(sys.exception(), KeyboardInterrupt):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return super().write(text)


def test_workers_put_everything_away_though_stdout_ends_with_the_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = family()

    def waits() -> None:
        import time

        try:
            (tmp_path / "runs").touch()
            while True:
                time.sleep(0.1)
        finally:
            for _ in range(4096):  # more than pipes and the launcher keep: ends only if it is read
                print("x" * 1023)
            (tmp_path / "put away").touch()

    def interrupt() -> None:
        eventually((tmp_path / "runs").exists, 60, "the function runs", 0.05)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys, "stdout", EndsWithTheInterrupt())
    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        bagua.launch(waits, nproc_per_node=1)
    watcher.join()
    assert (tmp_path / "put away").exists()
    eventually(lambda: family() <= before, 10, lambda: f"no process left: {family() - before}")


def test_a_job_that_does_not_stop_is_killed_though_nothing_can_be_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoReader(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    process = mock.Mock()
    monkeypatch.setattr(sys, "stderr", NoReader())
    with pytest.raises(BrokenPipeError):
        function_launch._kill_late(process, 60.0)
    process.kill.assert_called_once_with()


def test_a_worker_imports_what_the_caller_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only the caller's sys.path has; it imports another, whose name the current directory has too."""
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    for directory, answer in ((elsewhere, "the caller's"), (here, "another")):
        directory.mkdir()
        (directory / "answer_of_a_caller.py").write_text(f"ANSWER = {answer!r}\n")
    lines = "def answer():\n    import answer_of_a_caller\n    return answer_of_a_caller.ANSWER\n"
    (elsewhere / "function_of_a_caller.py").write_text(lines)
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.chdir(here)
    module = importlib.import_module("function_of_a_caller")
    try:
        assert bagua.launch(module.answer, nproc_per_node=1) == ["the caller's"]
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (True, TypeError), ("2", TypeError)])
def test_a_number_of_workers_that_is_none_is_refused(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="nproc_per_node="):
        bagua.launch(print, nproc_per_node=number)


def test_what_the_launcher_refuses_fails_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchFailed, match="exit code 2"):
        bagua.launch(print, nproc_per_node=1, options=["--no-such-option"])
    assert "no-such-option" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "limit_s"),
    [
        ([], LEAVE_LIMIT_S),
        (["--shutdown-timeout", "5"], LEAVE_LIMIT_S),
        (["--shutdown-timeout", "300"], 300 + LEAVE_MARGIN_S),
        (["--once", "--shutdown_timeout=300"], 300 + LEAVE_MARGIN_S),
        (["--shutdown-timeout", "soon"], LEAVE_LIMIT_S),
        (["--max-restarts", "300"], LEAVE_LIMIT_S),
    ],
)
def test_a_job_that_is_interrupted_has_its_shutdown_timeout(options: list[str], limit_s: float) -> None:
    assert leave_limit_s(options) == limit_s
