"""A worker hangs in its step while its agent lives: it is named, its stacks are saved, and it is replaced.

Times are short here; the defaults are half a minute and ten. A worker that only saves a checkpoint must be left alone.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node
from tests.faults.scraped_metrics import await_uses, port_of

NOTICE_S, TIMEOUT_S = 1.0, 4.0
SHORT = ["--rdzv-conf", f"hang_notice={NOTICE_S},hang_renew=2"]
# To its successor's first step: the timeout, stacks, and a start of a process.
REPLACED_BOUND_S = TIMEOUT_S + 12.0


def hanging(
    job: MakeJob, *words: str, timeout: str = f"{TIMEOUT_S:g}", metrics: bool = False
) -> tuple[Job, Node]:
    """Two workers on this machine, of which slot 1 hangs where `words` say."""
    served = ["--metrics-port", "0"] if metrics else []
    one = job(script=words, options=[*SHORT, "--hang-timeout", timeout, *served])
    node = one.start(slots=2)
    one.await_world(2, after_step=10)
    return one, node


def stacks(node: Node, worker_id: str) -> str:
    """All that was saved of that worker."""
    paths = re.findall(rf"stacks of worker {re.escape(worker_id)} in (\S+)", node.log)
    return "\n".join(Path(path).read_text() for path in paths)


def test_a_worker_that_sleeps_in_its_step_is_named_and_replaced(job: MakeJob) -> None:
    one, node = hanging(job, "--hang-at", "20", "--hang-in-slot", "1", metrics=True)
    victim = node.workers[1]
    node.await_line("1 of 2 wait for global rank 1", "outside the step's collectives")
    node.await_line("stacks of worker", victim.worker_id)
    assert "hang_here" in stacks(node, victim.worker_id)
    stalled = one.step
    node.await_line("worker in slot 1 ended: hung: 1 of 2 wait for global rank 1", "killed by SIGKILL")
    alone = one.await_world(1, after_step=stalled - 1, deadline_s=REPLACED_BOUND_S)
    node.await_line("did not happen", "for a silent peer", "a hang")
    one.await_world(2, after_step=alone)
    await_uses(port_of(node), {"hang", "failover"})
    one.finish()
    one.check(finished=2)


def test_without_a_timeout_it_is_named_and_left_alone(job: MakeJob) -> None:
    words = ("--hang-at", "20", "--hang-in-slot", "1", "--hang-s", "7")
    one, node = hanging(job, *words, timeout="never")
    victim = node.workers[1]
    node.await_line("stacks of worker", victim.worker_id)
    stalled = one.step
    one.await_world(2, after_step=stalled + 5)
    assert not node.says("ended: hung")
    assert node.workers[1].worker_id == victim.worker_id
    one.finish()
    one.check(finished=2)


def test_a_stopped_worker_is_replaced(job: MakeJob) -> None:
    one, node = hanging(job)
    victim = node.workers[1]
    victim.send(signal.SIGSTOP)
    node.await_line("stacks of worker", victim.worker_id, "is stopped")
    node.await_line("worker in slot 1 ended: hung:")
    alone = one.await_world(1, deadline_s=REPLACED_BOUND_S)
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)


@pytest.mark.long
def test_a_copy_that_takes_longer_than_hang_renew_is_made_once(job: MakeJob) -> None:
    """About 15 chunks; twice the time after which a generation is made again in which all members wait."""
    one = job(script=["--chunk-s", "0.4", "--step-s", "0.1"], options=SHORT, samples=24 * 150, epochs=1)
    node = one.start(slots=2)
    one.await_world(2, after_step=3)
    before = one.replace_killed_worker(node)
    assert one.largest_gap_s(before - 1, before) > 4.0, "the copy was slow"
    one.finish()
    assert not node.says("a new communicator for the same members")
    *_, alone, joined = sorted({(line.generation, line.world_size) for line in one.ledger.lines})
    assert (alone[1], joined) == (1, (alone[0] + 1, 2)), "the join needs one generation"
    one.check(finished=2)
