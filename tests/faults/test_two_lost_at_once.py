"""Two hosts of four are lost at the same moment; and all workers that the minimum asks for."""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import START_S, Node
from tests.lab.wait import eventually

# DESIGN 9: a silent host 1 s, a killed agent 0.5 s, the leader confirmed lost 0.5 s; here thrice, for two of them.
SILENT_BOUND_S = 6.0
KILLED_BOUND_S = 3.0


@pytest.mark.parametrize(
    ("how", "with_leader"),
    [
        ("power_off", True),
        pytest.param("kill_agent", True, marks=pytest.mark.long),
        pytest.param("power_off", False, marks=pytest.mark.long),
        pytest.param("kill_agent", False, marks=pytest.mark.long),
    ],
)
def test_two_hosts_of_four(job: MakeJob, make_lab: MakeLab, how: str, with_leader: bool) -> None:
    lab = make_lab(5)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:4")
    nodes = [one.start(lab.hosts[1])]
    nodes[0].await_line("this node leads")
    nodes += [one.start(host) for host in lab.hosts[2:]]
    one.await_world(4, after_step=9)
    lost = nodes[:2] if with_leader else nodes[1:3]
    began_s = time.monotonic()
    for node in lost:
        assert node.host is not None
        node.host.power_off() if how == "power_off" else node.kill_agent()
    one.await_world(2, after_step=one.last_world(4))
    bound_s = SILENT_BOUND_S if how == "power_off" else KILLED_BOUND_S
    leader = ", the leader's among them" if with_leader else ""
    one.measured(f"two of four hosts lost by {how}{leader}: next step", time.monotonic() - began_s, bound_s)
    one.finish([-9 if node in lost else 0 for node in nodes])
    one.check(finished=2)


def test_all_workers_of_the_minimum_are_killed_but_one(job: MakeJob, make_lab: MakeLab) -> None:
    """The job falls below its minimum, and goes on with new workers from the state of the one that is left."""
    lab = make_lab(3)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="2:2")
    nodes = [one.start(host, slots=2) for host in lab.hosts[1:]]
    one.await_world(4)
    keeper, *victims = [w for node in nodes for w in node.workers]
    for victim in victims:
        victim.kill()
    eventually(
        lambda: any(x.world_size == 4 and x.generation > 1 for x in one.ledger.lines),
        START_S,
        "a step by four workers in a later generation",
        0.05,
    )
    assert keeper in nodes[0].workers, "the holder of the state keeps its process"
    one.finish()
    one.check(finished=4)


def test_all_workers_of_the_minimum_are_killed(job: MakeJob, make_lab: MakeLab) -> None:
    """No worker has the state any more: the job says so within its bound, and does not begin anew in silence."""
    lab = make_lab(3)
    options = ["--rdzv-conf", "holder_timeout=2"]
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="2:2", options=options)
    nodes = [one.start(host) for host in lab.hosts[1:]]
    one.await_step(10)
    for worker in [w for node in nodes for w in node.workers]:
        worker.kill()
    for node in nodes:
        assert node.process.wait(30) != 0
        _says_that_the_state_is_lost(node)
    assert len({line.generation for line in one.ledger.lines}) == 1, "no second history"
    one.check_nothing_left()


def _says_that_the_state_is_lost(node: Node) -> None:
    assert node.says("ended: killed by SIGKILL") and node.says("state"), node.log
