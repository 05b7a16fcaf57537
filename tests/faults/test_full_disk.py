"""The disk that logs go to is full: training goes on, and a worker can be replaced."""

from __future__ import annotations

from tests.faults.conftest import MakeJob, MakeLab


def test_the_log_directory_is_full(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    disk = lab.hosts[1].small_disk(1 << 20)
    full = one.start(lab.hosts[1], options=["--log-dir", str(disk), "--redirects", "3"])
    full.await_line("is in force")
    lab.hosts[1].fill(disk)
    one.start(lab.hosts[2])
    one.await_world(2)
    victim = full.workers[0]
    victim.kill()
    full.await_line("worker in slot 0 ended: killed by SIGKILL; starting another")
    alone = one.await_world(1, after_step=one.last_world(2))
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)
