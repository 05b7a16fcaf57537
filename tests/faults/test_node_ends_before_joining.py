"""A script that ends with 0 on one node before init_process_group(): every node says so, and none waits without end."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, START_S
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("ends_before_joining.py")
ENDED = "ended with 0 before it joined the job"
JOIN_TIMEOUT_S = 6.0
# A wait is printed after 2 s. The rest is room for the interpreter's end, on processors shared with other tests.
SAID_WITHIN_S = 10.0


def connected(etcd: EmbeddedEtcd) -> Store:
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    store.connect(DEADLINE_S)
    return store


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
    ended, hold = tmp_path / "ended", tmp_path / "ended.hold"
    hold.touch()
    early = one.start(environment={"ENDS_EARLY": str(ended)})
    eventually(ended.exists, START_S, "the script is at its end on one node", 0.02)
    other = one.start()
    with closing(connected(etcd)) as store:
        agents = JobKeys(one.job_id).agents
        eventually(lambda: len(store.get_prefix(agents)[0]) == 2, START_S, "the other has joined", 0.02)
    hold.unlink()
    other.await_line("has its rank", deadline_s=START_S)
    assert [node.process.wait(DEADLINE_S) for node in (other, early)] == [0, 0]
    one.check_nothing_left()


def test_a_node_that_comes_as_the_job_ends_ends_with_it(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    """It had read the job before the others ended it, so it does not begin another; its worker waits in vain."""
    one = job(program=[str(SCRIPT)], nodes="2", endpoints=etcd.endpoint)
    node = one.start()
    keys = JobKeys(one.job_id)
    with closing(connected(etcd)) as store:
        eventually(lambda: store.get_prefix(keys.members)[0], START_S, "its worker is ready", 0.02)
        result = pb.Result(outcome=pb.Result.SUCCEEDED, reason="every worker ended with 0")
        store.put(keys.result, result.SerializeToString())
        assert node.process.wait(DEADLINE_S) == 0
    assert node.says("succeeded: every worker ended with 0")
    one.check_nothing_left()
