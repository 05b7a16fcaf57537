"""A real job whose workers never have memory for a copy beside the state: the promises hold all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_core.elastic.state.heal_memory import LIMIT_VARIABLE
from tests.faults import job as faults
from tests.faults.job import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    script = tmp_path / "without_memory.py"
    script.write_text(
        f"import os, runpy\nos.environ[{LIMIT_VARIABLE!r}] = '0'\n"
        f"runpy.run_path({str(faults.SCRIPT)!r}, run_name='__main__')\n"
    )
    made = Job(tmp_path, samples=3000, file=script, script=["--failpoints-once"])
    yield made
    made.end()


def test_a_newcomer_is_healed_in_place_and_ends_with_the_same_state(job: Job) -> None:
    node = job.start(slots=2, options=["--local-ranks-filter", "0,1"])
    job.await_step(5)
    node.workers[1].kill()
    job.await_world(2, after_step=job.await_world(1))
    assert node.says("no memory for a copy beside the live state", times=2), "at the start, and now"
    job.finish()
    job.check(finished=2)


def test_a_source_killed_while_it_sends_leaves_the_half_written_one_without_a_state(job: Job) -> None:
    node = job.start(slots=3, failpoints="heal.send=kill#1", options=["--local-ranks-filter", "0,1,2"])
    job.await_step(5)
    node.workers[2].kill()  # its successor copies in place, from two, of which one dies at that
    node.await_line("failpoint heal.send fired: kill")
    job.await_world(3, after_step=job.last_world(2))
    job.finish()
    job.check(finished=3)
