"""The wall clock of one host is an hour wrong, and jumps by an hour, forward and back, while it trains."""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.lab.clock import why_no_clock

HOUR_S = 3600.0
LATE_S = 60.0


@pytest.mark.skipif(why_no_clock() is not None, reason=str(why_no_clock()))
@pytest.mark.parametrize("of_leader", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_clock_of_one_host_jumps(job: MakeJob, make_lab: MakeLab, of_leader: bool) -> None:
    lab = make_lab(4)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:3")
    host = lab.hosts[1 if of_leader else 2]
    clock = host.own_clock()
    leader = one.start(lab.hosts[1])
    leader.await_line("this node leads")
    nodes = [leader, one.start(lab.hosts[2])]
    one.await_world(2, after_step=9)
    for ahead_s in (HOUR_S, -HOUR_S):
        clock.shift(ahead_s)
        assert abs(host.wall_clock_s() - time.time() - ahead_s) < LATE_S
        jumped = one.step
        one.await_step(jumped + 3)
        # the workers live by the wrong clock: it is what they date their lines with
        wrong = [
            x for x in one.ledger.lines if x.step > jumped and abs(x.time - time.time() - ahead_s) < LATE_S
        ]
        assert wrong, "no line is dated by the wrong clock"
    joins = one.step
    nodes.append(one.start(lab.hosts[3]))
    three = one.await_world(3, after_step=joins)
    for node in nodes:
        assert not node.says("did not happen"), "a clock costs no step"
        assert not node.says("lost"), node.log
    clock.shift(HOUR_S)
    nodes[1].workers[0].kill()
    one.await_world(2, after_step=three)
    one.await_world(3, after_step=one.last_world(2))
    one.finish()
    one.check(finished=3)
