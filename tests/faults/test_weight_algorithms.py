"""Workers that share weights come and go: no sample is lost or counted twice, and replicas end equal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job

# As on an idle machine it takes 0.25 s, and tests share few processors with a worker that starts.
NEXT_STEP_BOUND_S = 2.5
STRUCK_AT = 15  # local SGD begins a round in this step

DECENTRALIZED = ("decentralized", {})
PAIRS = ("decentralized", {"peer_selection": "shift_one"})
LOW_PRECISION = ("low_precision_decentralized", {})
LOCAL_SGD = ("local_sgd", {"sync_every": 5})
OUTER = ("local_sgd", {"sync_every": 5, "outer_optimizer": "nesterov", "compress": "uint8"})


def cell(choice: tuple[str, dict[str, Any]], point: str, long: bool = False) -> ParameterSet:
    marks = [pytest.mark.long] if long else []
    return pytest.param(choice, point, marks=marks, id="-".join([*map(str, choice), point]))


def script(choice: tuple[str, dict[str, Any]], **more: Any) -> list[str]:
    name, arguments = choice
    return ["--algorithm", name, "--algorithm-arguments", json.dumps({**arguments, **more})]


def check_next_step(one: Job, choice: tuple[str, dict[str, Any]], before: int, after: int) -> None:
    """Both sides of the loss."""
    gap_s = one.largest_gap_s(before, after)
    one.measured(f"{choice[0]} {choice[1]}: worker lost, next step", gap_s, NEXT_STEP_BOUND_S)


@pytest.mark.parametrize(
    ("choice", "point"),
    [
        # The vote is about to begin: this step's exchange has come to its end, and is taken back by all.
        cell(DECENTRALIZED, "reduction.before"),
        cell(PAIRS, "reduction.before", long=True),
        cell(LOW_PRECISION, "reduction.before"),
        cell(LOCAL_SGD, "reduction.before", long=True),
        cell(OUTER, "reduction.before"),
        # Its exchange has not begun: neighbours wait for it.
        cell(PAIRS, "step.begin", long=True),
        cell(LOW_PRECISION, "step.begin", long=True),
        cell(LOCAL_SGD, "step.begin", long=True),
        # The step is final on it, and maybe not on others.
        cell(DECENTRALIZED, "reduction.done", long=True),
        cell(LOW_PRECISION, "reduction.done", long=True),
        cell(OUTER, "reduction.done", long=True),
    ],
)
def test_one_of_three_is_killed_in_a_step(
    job: MakeJob, choice: tuple[str, dict[str, Any]], point: str
) -> None:
    """Three single workers: an odd count, and then an even one."""
    flat = {} if choice[0] == "local_sgd" else {"hierarchical": False}
    one = job(script=script(choice, **flat))
    node = one.start(slots=3, failpoints=f"{point}=kill@{STRUCK_AT}#1")
    node.await_line(f"bagua failpoint {point} fired: kill at step {STRUCK_AT}")
    node.await_line("ended: killed by SIGKILL; starting another")
    alone = one.await_world(2, after_step=STRUCK_AT)
    check_next_step(one, choice, STRUCK_AT - 2, alone)
    one.await_world(3, after_step=alone)
    one.finish()
    one.check(finished=3)


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(DECENTRALIZED, id="decentralized"),
        pytest.param(PAIRS, id="pairs", marks=pytest.mark.long),
        pytest.param(LOW_PRECISION, id="low precision", marks=pytest.mark.long),
    ],
)
def test_a_node_joins_and_a_nodes_first_worker_is_killed(
    job: MakeJob, make_lab: MakeLab, choice: tuple[str, dict[str, Any]]
) -> None:
    """Hierarchical: the worker that is lost speaks for its node, and another one has to."""
    lab = make_lab(3)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", script=script(choice))
    first = one.start(lab.hosts[1], slots=2)
    alone = one.await_world(2, after_step=10)
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


@pytest.mark.long
def test_rounds_go_on_through_a_join_and_a_lost_host(job: MakeJob, make_lab: MakeLab) -> None:
    """Local SGD with an outer optimizer: the newcomer has its anchor and momentum, and keeps the job's state alone."""
    lab = make_lab(3)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", script=script(OUTER))
    first = one.start(lab.hosts[1])
    one.await_step(12)
    second = one.start(lab.hosts[2])
    both = one.await_world(2)
    assert not first.missed_a_peer and not second.missed_a_peer, "a join costs no step"
    one.await_step(both + 6)  # behind a round; so late in the job every step lasts a second
    first.kill_agent()
    second.await_line("lost", "1 worker on 1 node")
    alone = one.await_world(1, after_step=one.last_world(2))
    check_next_step(one, OUTER, alone - 3, alone)
    one.await_step(alone + 6)
    one.start(lab.hosts[1])
    one.await_world(2, after_step=alone)
    one.finish([-9, 0, 0])
    one.check(finished=2)
