"""A script that ends with 0 on one node before init_process_group(): every node says so, and none waits without end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, START_S
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("ends_before_joining.py")
ENDED = "ended with 0 before it joined the job"
JOIN_TIMEOUT_S = 6.0
# A wait is printed after 2 s. The rest is room for the interpreter's end, on processors shared with other tests.
SAID_WITHIN_S = 10.0


@pytest.mark.parametrize("leads", [False, True], ids=["another leads", "its node leads"])
def test_the_others_say_so_and_end(job: MakeJob, tmp_path: Path, etcd: EmbeddedEtcd, leads: bool) -> None:
    options = ["--rdzv-conf", f"join_timeout={JOIN_TIMEOUT_S:g}"]
    one = job(program=[str(SCRIPT)], nodes="2", endpoints=etcd.endpoint, options=options)
    ended = tmp_path / "ended"
    early, environment = None, {"ENDS_EARLY": str(ended)}
    if leads:
        early = one.start(environment=environment)
        early.await_line("this node leads")
        other = one.start()
    else:
        other = one.start()
        other.await_line("this node leads")
        early = one.start(environment=environment)
    eventually(ended.exists, START_S, "the script has ended on one node", 0.02)
    ended_s = time.monotonic()
    for node in (other, early):
        node.await_line(
            "waiting", ENDED, f"fails {JOIN_TIMEOUT_S:g} s after that", "unless another node joins"
        )
    one.measured("told of the end before joining", time.monotonic() - ended_s, SAID_WITHIN_S)
    assert [node.process.wait(DEADLINE_S) for node in (other, early)] == [1, 1]
    for node in (other, early):
        assert node.says("failed: too few nodes", ENDED)
    one.check_nothing_left()


def test_the_others_go_on_if_they_are_enough(job: MakeJob, tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    """With init_process_group() the first workers wait for every node that is there; not for this one."""
    one = job(program=[str(SCRIPT)], nodes="1:2", endpoints=etcd.endpoint)
    ended = tmp_path / "ended"
    early = one.start(environment={"ENDS_EARLY": str(ended)})
    eventually(ended.exists, START_S, "the script has ended on one node", 0.02)
    other = one.start()
    other.await_line("have their ranks", deadline_s=START_S)
    assert [node.process.wait(DEADLINE_S) for node in (other, early)] == [0, 0]
    one.check_nothing_left()
