"""What tests of benchmarks need, and how the zygote starts what short forms start.

A short form measures nothing, and would spend most of its processor time on importing torch in each process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result_file
from benchmarks.net_driver import libnccl
from tests.lab import namespaces, zygote
from tests.lab.network import Host
from tests.lab.process import LabProcess


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a benchmark that is started with --keep writes its results in this test."""
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    monkeypatch.setattr(result_file, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def nccl_on_lab_hosts() -> None:
    """Skips where no lab host can be made, or NCCL's library is missing."""
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    try:
        libnccl.path()
    except libnccl.LibraryUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def forked_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that benchmarks run on the lab's hosts and on this machine are forked from the zygote, not started."""
    run, init = Host.run, LabProcess.__init__

    def run_forked(host: Host, argv: Sequence[Any], **options: Any) -> LabProcess:
        words = [str(word) for word in argv]
        if _can_fork(words, options.get("env"), options.get("output")):
            return host.run_agent(words, options["env"], options["output"])
        return run(host, argv, **options)

    def init_forked(self: LabProcess, enter: Sequence[str], argv: Sequence[str], **options: Any) -> None:
        if not enter and not options.get("forked") and _can_fork(argv, options["env"], options["output"]):
            options["forked"] = zygote.start(argv, options["env"], options["output"], os.getcwd(), None)
        init(self, enter, argv, **options)

    monkeypatch.setattr(Host, "run", run_forked)
    monkeypatch.setattr(LabProcess, "__init__", init_forked)


def _can_fork(words: Sequence[str], env: Mapping[str, str] | None, output: Path | None) -> bool:
    if env is None or output is None or not zygote.can_start(words, env):
        return False
    return zygote.module_of(words, env) is not None
