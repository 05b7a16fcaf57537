"""One of two ranks does something else than the other: both are named within seconds, and the job fails.

With a budget of script failures, which must not be spent on it.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, START_S, Node
from tests.lab.wait import eventually

NAMED_WITHIN_S = 10.0
# On two processors that other tests use too, a step and a report of a worker may take seconds, not milliseconds.
SLOW_MACHINE_S = 5.0
# Ranks that disagree reach no step boundary, so a leave at one never ends.
INTERRUPT_WITHIN_S = 15.0

SCRIPT = Path(__file__).with_name("disagreeing.py")


def line_of(words: str) -> int:
    return 1 + next(n for n, text in enumerate(SCRIPT.read_text().splitlines()) if words in text)


OTHERS = rf"rank 0 waits in the step's reductions \(disagreeing\.py:{line_of('the others wait here')}\)"
EPOCH_END = rf"disagreeing\.py:{line_of('the one whose stream ends waits here')}"
ODD_SITE = rf"disagreeing\.py:{line_of('the odd one waits here')}"


@pytest.mark.parametrize(
    ("what", "odd", "raising"),
    [
        ("collective", rf"rank 1 waits in barrier \({ODD_SITE}\)", {0, 1}),
        ("stream", rf"rank 1 waits at the end of the epoch \({EPOCH_END}\)", {0, 1}),
        ("skips", rf"rank 1 waits at the step boundary \({EPOCH_END}\)", {0, 1}),
        ("leaves", r"rank 1 waits at the end of training \(its script has ended\)", {0, 1}),
    ],
)
def test_what_each_rank_waits_in_is_named(
    job: MakeJob, tmp_path: Path, what: str, odd: str, raising: set[int]
) -> None:
    did = tmp_path / "did"
    one = job(
        program=[str(SCRIPT), what, "--did", str(did)], options=["--max-restarts", "3", "--label-output"]
    )
    node = one.start(slots=2)
    node.await_line("is in force", deadline_s=2 * START_S)  # starts of several workers, on a busy machine
    eventually(did.exists, DEADLINE_S, "rank 1 does something else", 0.02)
    did_s = time.monotonic()
    node.await_line("ranks disagree")
    one.measured("named the ranks", time.monotonic() - did_s, NAMED_WITHIN_S + SLOW_MACHINE_S)
    assert node.process.wait(DEADLINE_S) == 1
    both = rf"ranks disagree: (?:{OTHERS}; {odd}|{odd}; {OTHERS})"
    assert re.search(rf"job \S+ failed: {both}\n", node.log)
    check(node, both, raising)
    one.check_nothing_left()


def test_a_rank_with_a_backward_more_than_the_others_fails_the_job(job: MakeJob, tmp_path: Path) -> None:
    did = tmp_path / "did"
    one = job(program=[str(SCRIPT), "twice", "--did", str(did)], options=["--label-output"])
    node = one.start(slots=2)
    assert node.process.wait(2 * START_S) == 1
    assert did.exists()
    both = r"rank 0 reduces the gradients of backward 1 in step 7 and rank 1 those of backward 2 in step 6"
    assert re.search(rf"\[\S+\]: \S*BackwardsDiffer: {both}", node.log), (
        "the job may end before both have said it"
    )
    one.check_nothing_left()


def test_a_rank_that_trains_another_model_fails_the_job(job: MakeJob, tmp_path: Path) -> None:
    """Gloo would end its process: the models have different sizes."""
    did = tmp_path / "did"
    one = job(program=[str(SCRIPT), "model", "--did", str(did)], options=["--label-output"])
    node = one.start(slots=2)
    assert node.process.wait(2 * START_S) == 1
    assert did.exists()
    assert re.search(
        r"\[\S+\]: \S*BackwardsDiffer: rank 0 is at model 1 \(Linear\) and rank 1 at model 2", node.log
    )
    assert not node.says("SIGABRT")
    one.check_nothing_left()


@pytest.mark.parametrize("named_first", [False, True], ids=["at once", "once they are named"])
def test_an_interrupt_ends_a_job_whose_ranks_disagree(
    job: MakeJob, tmp_path: Path, named_first: bool
) -> None:
    did = tmp_path / "did"
    one = job(program=[str(SCRIPT), "collective", "--did", str(did)], options=["--label-output"])
    node = one.start(slots=2)
    eventually(did.exists, 2 * START_S, "rank 1 does something else", 0.02)
    if named_first:
        node.await_line("ranks disagree")
    node.send(signal.SIGINT)
    sent_s = time.monotonic()
    code = node.process.wait(DEADLINE_S)
    one.measured("ended by the interrupt", time.monotonic() - sent_s, INTERRUPT_WITHIN_S)
    assert code in ({1, 128 + signal.SIGINT} if named_first else {128 + signal.SIGINT})
    one.check_nothing_left()


def test_a_rank_that_ended_with_0_is_named(job: MakeJob) -> None:
    one = job(program=[str(SCRIPT), "exits"], options=["--max-restarts", "3", "--label-output"])
    node = one.start(slots=2)
    node.await_line("is in force", deadline_s=2 * START_S)  # starts of several workers, on a busy machine
    assert node.process.wait(DEADLINE_S) == 1
    # a worker that lost its peer may be in the step, or wait for a generation by then
    both = r"ranks disagree: rank 0 waits [^;\n]*; rank 1 ended with exit code 0 \(its last report was of step \d+\)"
    assert re.search(rf"job \S+ failed: {both}\n", node.log)
    check(node, both, {0})
    one.check_nothing_left()


def check(node: Node, both: str, raising: set[int]) -> None:
    for rank in raising:
        assert re.search(rf"\[\S+:{rank}\]: \S*MismatchedCollective: {both}", node.log), rank
    assert not node.says("starting another")
