"""Workers that share compressed gradients come and go: no sample is lost or counted twice, and all end alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from bagua_core.communication.compressed.compressed_sum import LEAST_ELEMENTS
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job

# As on an idle machine it takes 0.25 s, and tests share few processors with a worker that starts.
NEXT_STEP_BOUND_S = 2.5
WARMUP_STEPS = 20  # of train.py's QAdam
STRUCK_AT = WARMUP_STEPS + 10
WIDTH = 1024
assert 21 * WIDTH > LEAST_ELEMENTS, "or the model's only bucket is not compressed"
OPTIONS = ["--digest-every", "10"]  # and one that differs would end the job

BYTEGRAD = ("bytegrad", {})
EIGHT_BITS = ("qadam", {"bits": 8})
ONE_BIT = ("qadam", {"bits": 1})
POWER_SGD = ("power_sgd", {"hierarchical": False})  # torch's hook
NODES_FIRST = ("gradient_allreduce", {"hierarchical": True})

Choice = tuple[str, dict[str, Any]]


def cell(choice: Choice, point: str, step: int = STRUCK_AT, long: bool = False) -> ParameterSet:
    marks = [pytest.mark.long] if long else []
    return pytest.param(choice, point, step, marks=marks, id="-".join([*map(str, choice), point, str(step)]))


def script(choice: Choice, **more: Any) -> list[str]:
    name, arguments = choice
    words = ["--algorithm", name, "--algorithm-arguments", json.dumps({**more, **arguments})]
    return [*words, "--width", str(WIDTH)]


def check_next_step(one: Job, choice: Choice, before: int, after: int) -> None:
    """Both sides of the loss."""
    gap_s = one.largest_gap_s(before, after)
    one.measured(f"{choice[0]} {choice[1]}: worker lost, next step", gap_s, NEXT_STEP_BOUND_S)


@pytest.mark.parametrize(
    ("choice", "point", "step"),
    [
        # The last bucket has not left: the others wait for its first message.
        cell(BYTEGRAD, "reduction.before"),
        cell(POWER_SGD, "reduction.before"),
        cell(POWER_SGD, "reduction.done", long=True),
        cell(EIGHT_BITS, "reduction.before", long=True),
        cell(ONE_BIT, "reduction.before"),
        # The step is final on it, and maybe not on others, who then lack its sum.
        cell(BYTEGRAD, "reduction.done", long=True),
        cell(EIGHT_BITS, "reduction.done", long=True),
        cell(ONE_BIT, "reduction.done", long=True),
        cell(BYTEGRAD, "step.begin", long=True),
        # The newcomer comes in around the end of the warm-up, and has to be told that it is over.
        cell(EIGHT_BITS, "step.begin", WARMUP_STEPS - 1, long=True),
        cell(ONE_BIT, "step.begin", WARMUP_STEPS, long=True),
    ],
)
def test_one_of_three_is_killed_in_a_step(job: MakeJob, choice: Choice, point: str, step: int) -> None:
    one = job(options=OPTIONS, script=script(choice, hierarchical=False))
    node = one.start(slots=3, failpoints=f"{point}=kill@{step}#1")
    node.await_line(f"bagua failpoint {point} fired: kill at step {step}")
    node.await_line("ended: killed by SIGKILL; starting another")
    alone = one.await_world(2, after_step=step)
    check_next_step(one, choice, step - 2, alone)
    one.await_world(3, after_step=alone)
    one.finish()
    one.check(finished=3)


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(BYTEGRAD, id="bytegrad"),
        pytest.param(POWER_SGD, id="power_sgd"),
        *[pytest.param(c, id=str(c), marks=pytest.mark.long) for c in (EIGHT_BITS, ONE_BIT, NODES_FIRST)],
    ],
)
def test_a_node_joins_and_a_nodes_first_worker_is_killed(
    job: MakeJob, make_lab: MakeLab, choice: Choice
) -> None:
    """Of two nodes with two workers and one: the lost worker exchanged sums for its node, and another takes over. Flat
    sums have no such worker."""
    lab = make_lab(3)
    endpoints = lab.etcd(lab.hosts[0]).endpoints
    one = job(
        endpoints=endpoints,
        nodes="1:2",
        options=OPTIONS,
        script=script(choice, hierarchical=True),
    )
    first = one.start(lab.hosts[1], slots=2)
    alone = one.await_world(2, after_step=WARMUP_STEPS + 5)
    second = one.start(lab.hosts[2])
    both = one.await_world(3, after_step=alone)
    assert not first.missed_a_peer and not second.missed_a_peer, "a join costs no step"
    first.workers[0].kill()
    first.await_line("worker in slot 0 ended: killed by SIGKILL")
    lost = one.await_world(2, after_step=max(both, one.last_world(3)))
    check_next_step(one, choice, lost - 3, lost)
    one.await_world(3, after_step=lost)
    assert first.missed_a_peer or second.missed_a_peer, "the fault was among workers that trained"
    one.finish()
    one.check(finished=3)
