"""Jobs that end with their test, and the lab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.job import Job
from tests.lab.fixtures import MakeLab, lab, make_lab

__all__ = ["MakeJob", "MakeLab", "etcd", "job", "lab", "make_lab"]

MakeJob = Callable[..., Job]


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    """On this machine, for jobs that need no lab."""
    server = EmbeddedEtcd.start()
    yield server
    server.stop()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MakeJob]:
    """Makes a job; takes Job's keywords. What still runs after the test is killed, and all output shown."""
    made: list[Job] = []

    def make(**keywords: object) -> Job:
        directory = tmp_path / f"job-{len(made)}"
        directory.mkdir()
        made.append(Job(directory, **keywords))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.end()
