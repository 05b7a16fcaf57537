"""Two of three training hosts no longer reach each other, in one direction or both; all reach etcd.

All agents still answer the leader, directly or through the third, so no probe finds a loss.
"""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job
from tests.lab.network import Host

# DESIGN 9 allows a silent host 1 s. A cut between two is found only by trying to meet again.
PROGRESS_BOUND_S = 8.0
# TCP sends again after twice the time it waited before: about as long as the cut lasted.
HEALED_BOUND_S = 6.0


def three_nodes(job: MakeJob, make_lab: MakeLab) -> tuple[Job, list[Host]]:
    """In step 20; the first leads. etcd is on a host of its own."""
    lab = make_lab(4)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:3")
    leader = one.start(lab.hosts[1])
    leader.await_line("this node leads")
    for host in lab.hosts[2:]:
        one.start(host)
    one.await_world(3, after_step=19)
    return one, lab.hosts[1:]


@pytest.mark.parametrize(
    ("sender", "receiver", "one_way"),
    [
        (1, 2, True),
        pytest.param(2, 1, True, marks=pytest.mark.long),
        pytest.param(0, 2, True, marks=pytest.mark.long),
        pytest.param(1, 2, False, marks=pytest.mark.long),
    ],
)
def test_the_job_goes_on_without_one_of_two_hosts_that_are_cut_from_each_other(
    job: MakeJob, make_lab: MakeLab, sender: int, receiver: int, one_way: bool
) -> None:
    one, hosts = three_nodes(job, make_lab)
    hosts[sender].cut_to(hosts[receiver], one_way=one_way)
    began_s = time.monotonic()
    two = one.await_world(2, after_step=one.last_world(3), deadline_s=PROGRESS_BOUND_S)
    one.measured("cut between two of three: next step", time.monotonic() - began_s, PROGRESS_BOUND_S)
    one.await_step(two + 5)
    hosts[sender].heal_to(hosts[receiver])
    one.await_world(3, after_step=two)
    one.finish()
    one.check(finished=3)


@pytest.mark.parametrize(
    ("sender", "receiver", "one_way"),
    [
        (1, 2, True),
        pytest.param(2, 1, True, marks=pytest.mark.long),
        pytest.param(0, 2, True, marks=pytest.mark.long),
        pytest.param(1, 2, False, marks=pytest.mark.long),
    ],
)
def test_a_cut_between_two_hosts_heals_without_harm(
    job: MakeJob, make_lab: MakeLab, sender: int, receiver: int, one_way: bool
) -> None:
    one, hosts = three_nodes(job, make_lab)
    hosts[sender].cut_to(hosts[receiver], one_way=one_way)
    stalled = one.await_stall(1.0)
    hosts[sender].heal_to(hosts[receiver])
    healed_s = time.monotonic()
    one.await_world(3, after_step=stalled + 1)
    one.measured("cut healed: next step", time.monotonic() - healed_s, HEALED_BOUND_S)
    one.finish()
    one.check(finished=3)
