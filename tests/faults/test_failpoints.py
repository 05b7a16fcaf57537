"""A worker is killed at each edge of the protocol: in a step, a commit, a switch, a heal, at the end.

The failpoint prints that it fired, so no test passes without its fault.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import EPOCHS, STEPS, Node

EPOCH_ENDS = STEPS // EPOCHS


def long(point: object) -> ParameterSet:
    """Left to the long form: its neighbours show most of what it can show."""
    return pytest.param(point, marks=pytest.mark.long)


def fired(node: Node, point: str) -> None:
    node.await_line(f"bagua failpoint {point} fired: kill")
    node.await_line("ended: killed by SIGKILL; starting another")


@pytest.mark.parametrize(
    "point",
    [
        long("step.begin"),
        "reduction.before",
        long("reduction.done"),
        "commit.before",
        long("commit.after"),
        "ledger.before",
    ],
)
def test_killed_in_a_step(job: MakeJob, point: str) -> None:
    one = job()
    node = one.start(slots=2, failpoints=f"{point}=kill@15#1")
    fired(node, point)
    alone = one.await_world(1)
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)


@pytest.mark.parametrize("point", ["reduction.before", long("reduction.done")])
def test_killed_in_the_second_part_of_a_step(job: MakeJob, point: str) -> None:
    """Two models, each with its own backward and optimizer step: the first part is final, and is not done twice."""
    one = job(script=["--two-parts"])
    node = one.start(slots=3, failpoints=f"{point}=sleep:0@15#1;{point}=kill@15#1")
    fired(node, point)
    one.await_world(3, after_step=one.await_world(2))
    one.finish()
    one.check(finished=3)


@pytest.mark.parametrize("point", ["switch.before", long("entry.built"), "entry.exchanged", "heal.send"])
def test_a_member_is_killed_when_a_node_joins(job: MakeJob, make_lab: MakeLab, point: str) -> None:
    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    # The points are passed in the first generation too, before any step: the second pass is meant.
    node = one.start(lab.hosts[0], slots=2, failpoints=f"{point}=sleep:0@0#1;{point}=kill#1")
    one.await_step(10)
    one.start(lab.hosts[1])
    fired(node, point)
    one.await_world(3)
    one.finish()
    one.check(finished=3)


@pytest.mark.parametrize(
    "point",
    [long("switch.before"), "entry.built", long("entry.exchanged"), long("heal.receive"), "heal.swap"],
)
def test_a_newcomer_is_killed_when_it_joins(job: MakeJob, make_lab: MakeLab, point: str) -> None:
    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", script=["--failpoints-once"])
    first = one.start(lab.hosts[0], slots=2)
    one.await_step(10)
    second = one.start(lab.hosts[1], failpoints=f"{point}=kill")
    fired(second, point)
    second.await_line("is in force from step")  # its next worker's first commit
    one.await_world(3)
    one.finish()
    one.check(finished=3)
    assert not first.says("ended: killed")


def test_a_newcomer_is_killed_after_all_have_switched_to_its_generation(
    job: MakeJob, make_lab: MakeLab
) -> None:
    """The next planned record is there before the members notice that they can't enter this one."""
    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", script=["--failpoints-once"])
    first = one.start(lab.hosts[0], slots=2, failpoints="entry.built=sleep:0;entry.built=sleep:2")
    one.await_step(10)
    second = one.start(lab.hosts[1], failpoints="entry.built=sleep:30")
    first.await_line("failpoint entry.built fired: sleep", times=4)  # each in generations 1 and 2
    second.workers[0].kill()
    first.await_line("generation 4", "drops h2")
    second.await_line("is in force from step")
    one.finish()
    one.check(finished=3)


@pytest.mark.parametrize("slot", [0, long(1)])
def test_killed_after_a_collective_outside_a_step(job: MakeJob, slot: int) -> None:
    one = job(script=["--evaluate"])
    node = one.start(slots=2, failpoints=f"outside.done=kill@{EPOCH_ENDS}#{slot}")
    fired(node, "outside.done")
    alone = one.await_world(1)
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)


def test_killed_when_training_is_done(job: MakeJob) -> None:
    one = job(samples=240, epochs=1)
    node = one.start(slots=2, failpoints="finish.done=kill#1")
    one.hurry()
    node.await_line("bagua failpoint finish.done fired: kill")
    code = node.process.wait(40)
    assert one.ledger.check(240, 1) == []
    # Its script may have been about to write the final model, so the job says that it failed; unless its end
    # came before the news that training is done: then it is a worker that the others did without.
    assert (code, node.says("failed after training was done")) in ((137, True), (0, False))
    one.check_nothing_left()
