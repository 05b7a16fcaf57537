"""A host or an agent is lost while a change of membership is under way: a join, a heal, the switch."""

from __future__ import annotations

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Node
from tests.lab.network import Lab

PAUSE = "sleep:1.5"  # long enough for a loss during it


def two_and_a_newcomer(
    job: MakeJob, make_lab: MakeLab, member: str = "", newcomer: str = ""
) -> tuple[Lab, Job, list[Node]]:
    """Two nodes in step 10 and a third on its way, with these failpoints of workers. The first node leads."""
    lab = make_lab(4)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:3")
    first = one.start(lab.hosts[1])
    first.await_line("this node leads")
    second = one.start(lab.hosts[2], failpoints=member)
    one.await_world(2, after_step=9)
    return lab, one, [first, second, one.start(lab.hosts[3], failpoints=newcomer)]


# Members pass these points in the first generation too, unless they come to it second: then as newcomers.
@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("member", "entry.built"),
        pytest.param("member", "heal.receive", marks=pytest.mark.long),
        ("newcomer", "heal.swap"),
        pytest.param("member", "heal.swap", marks=pytest.mark.long),
        pytest.param("newcomer", "entry.built", marks=pytest.mark.long),
        pytest.param("newcomer", "heal.receive", marks=pytest.mark.long),
    ],
)
def test_a_host_is_lost_while_a_newcomer_comes_in(
    job: MakeJob, make_lab: MakeLab, victim: str, point: str
) -> None:
    _, one, nodes = two_and_a_newcomer(job, make_lab, newcomer=f"{point}={PAUSE}")
    nodes[2].await_line(f"failpoint {point} fired: sleep")
    lost = nodes[1] if victim == "member" else nodes[2]
    assert lost.host is not None
    lost.host.power_off()
    after = one.step
    one.await_world(2, after_step=after + 1)
    one.finish([-9 if node is lost else 0 for node in nodes])
    one.check(finished=2)


@pytest.mark.parametrize("how", ["kill_agent", pytest.param("power_off", marks=pytest.mark.long)])
def test_the_leader_is_lost_while_a_newcomer_heals(job: MakeJob, make_lab: MakeLab, how: str) -> None:
    _, one, nodes = two_and_a_newcomer(job, make_lab, newcomer=f"heal.receive={PAUSE}")
    nodes[2].await_line("failpoint heal.receive fired: sleep")
    host = nodes[0].host
    assert host is not None
    host.power_off() if how == "power_off" else nodes[0].kill_agent()
    one.await_world(2, after_step=one.step + 1)
    one.finish([-9, 0, 0])
    one.check(finished=2)


def test_a_host_is_lost_in_the_switch(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:3")
    # The second pass of the point is meant: the first is the beginning.
    points = f"switch.before=sleep:0@0;switch.before={PAUSE}"
    nodes = [one.start(lab.hosts[1])]
    nodes[0].await_line("this node leads")
    nodes.append(one.start(lab.hosts[2], failpoints=points))
    one.await_world(2)
    nodes.append(one.start(lab.hosts[3]))
    nodes[1].await_line("failpoint switch.before fired: sleep", times=2)
    lab.hosts[2].power_off()
    one.await_world(2, after_step=one.step + 1)
    one.finish([0, -9, 0])
    one.check(finished=2)
