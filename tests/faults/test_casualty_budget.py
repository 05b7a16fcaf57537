"""A group of the script's own breaks when a peer dies, and takes a survivor along: that draws on no budget.

In these jobs the first workers of two places meet in a Gloo group that this runtime knows nothing of, once three
workers train, and reduce in it in each step. Others, and all successors, only train: one of them keeps the state.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.faults.job as harness
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.membership.failures.restart_policy import judge
from bagua_agent.membership.failures.root_cause import Kind, classify
from bagua_agent.membership.view import FailureView
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job
from tests.lab.etcd import EtcdCluster

PAIRED = """
import os, runpy, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import bagua_core as bagua
from bagua_core import init_process_group  # by this the agent sees that its workers follow membership in process

OUT = Path(sys.argv[sys.argv.index("--out") + 1])
PLACE = os.environ.get("PAIR_PLACES", "").split(",")[int(os.environ["BAGUA_SLOT"])]


def is_first(what):
    try:
        (OUT / what).open("x").close()
    except FileExistsError:
        return False
    return True


pair = None
real = F.cross_entropy


def cross_entropy(*arguments):
    global pair
    # in a step that both are in: the other would else wait for this one in a collective of the job
    if pair is None and PLACE and bagua.get_world_size() == 3 and is_first("paired-" + PLACE):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=os.environ["BAGUA_BIND_HOST"])]
        options._timeout = timedelta(seconds=60)
        store = dist.FileStore(str(OUT / "pair"), 2)
        pair = dist.ProcessGroupGloo(store, int(PLACE), 2, options)
    if pair is not None:
        pair.allreduce([torch.ones(1)]).wait()
        (OUT / ("reduced-" + PLACE)).touch()
    elif PLACE == "0" and (OUT / "raise").exists() and is_first("has-raised"):
        raise ValueError("a sample of its own")
    return real(*arguments)


F.cross_entropy = cross_entropy
"""

MakePaired = Callable[..., Job]


@pytest.fixture
def paired(job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakePaired:
    """Takes Job's keywords."""
    script = tmp_path / "paired.py"
    script.write_text(f"{PAIRED}\nrunpy.run_path({str(harness.SCRIPT)!r}, run_name='__main__')\n")
    monkeypatch.setattr(harness, "SCRIPT", script)
    return job


def await_pair(one: Job) -> None:
    """Until three workers train, and two of them use their own group."""
    one.await_world(3, after_step=one.await_world(3))
    for place in range(2):
        assert (one.out / f"reduced-{place}").exists(), "the pair reduces"


def failures(cluster: EtcdCluster, job_id: str) -> dict[str, pb.Failure]:
    """What the job's store says of workers that did not end well."""
    found = cluster.standing(JobKeys(job_id).failures)
    records = [pb.Failure.FromString(stands.value) for stands in found.values()]
    return {record.worker_id: record for record in records}


def kind_of(record: pb.Failure) -> Kind:
    return classify(record.cause, record.traceback_tail).kind


def used(records: dict[str, pb.Failure], allowed: int) -> str:
    """What the job's budget looks like after these failures."""
    seen = [
        FailureView(f.worker_id, f.node_name, f.step, f.in_step, f.script_failure, f.cause, n)
        for n, f in enumerate(records.values())
    ]
    return judge(seen, allowed, trained=True).reason


def test_a_casualty_of_a_killed_worker_is_not_charged(paired: MakePaired, make_lab: MakeLab) -> None:
    """One script failure is allowed and one happens, after the casualty."""
    [host] = make_lab(1).hosts
    cluster = host.lab.etcd(host)
    one = paired(endpoints=cluster.endpoints, nodes="1", options=["--max-restarts", "1"])
    node = one.start(host, slots=3, environment={"PAIR_PLACES": ",0,1"})
    await_pair(one)
    _, survivor, victim = node.workers
    victim.kill()
    node.await_line("worker in slot 2 ended: killed by SIGKILL")
    node.await_line("worker in slot 1", "a casualty of global rank", "(killed by SIGKILL)")
    alone = one.await_world(1)
    both_back = one.await_world(3, after_step=alone)
    known = failures(cluster, one.job_id)
    assert set(known) == {survivor.worker_id, victim.worker_id}
    assert known[victim.worker_id].exit_code == -signal.SIGKILL, "the kill happened"
    assert known[survivor.worker_id].exit_code == 1, "and took the other one along"
    assert kind_of(known[survivor.worker_id]) is Kind.CASUALTY
    assert used(known, 1) == "0 of 1 script failures used"
    (one.out / "raise").touch()
    node.await_line("worker in slot 1 ended: ValueError: a sample of its own; starting another")
    one.await_world(3, after_step=one.await_world(2, after_step=both_back))
    one.finish()
    one.check(finished=3)
    known = failures(cluster, one.job_id)
    assert [f.cause for f in known.values() if f.script_failure] == ["ValueError: a sample of its own"]
    assert used(known, 1) == "1 of 1 script failures used"


@pytest.mark.parametrize("leads", [False, True])
def test_a_casualty_of_a_lost_host_is_not_charged(paired: MakePaired, make_lab: MakeLab, leads: bool) -> None:
    """An agent dies with its worker, so no agent records how that one ended. No script failure is allowed."""
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = paired(endpoints=cluster.endpoints, nodes="1:3")
    keeper, survivor, victim = lab.hosts[1:]
    places = {keeper: "", survivor: "0", victim: "1"}
    order = [victim, keeper, survivor] if leads else [keeper, survivor, victim]
    nodes = {}
    for host in order:
        nodes[host] = one.start(host, environment={"PAIR_PLACES": places[host]})
        if len(nodes) == 1:
            nodes[host].await_line("this node leads")
    await_pair(one)
    [casualty], [lost] = nodes[survivor].workers, nodes[victim].workers
    before = one.last_world(3)
    nodes[victim].kill_agent()
    nodes[survivor].await_line("worker in slot 0", "a casualty of global rank", "(gone)")
    alone = one.await_world(1, after_step=before)
    one.await_world(2, after_step=alone)
    known = failures(cluster, one.job_id)
    assert lost.worker_id not in known
    assert known[casualty.worker_id].exit_code == 1 and kind_of(known[casualty.worker_id]) is Kind.CASUALTY
    assert used(known, 0) == "0 of 0 script failures used"
    one.finish([-9 if host is victim else 0 for host in order])
    one.check(finished=2)
