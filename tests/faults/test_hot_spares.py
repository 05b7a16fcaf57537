"""A node beyond the maximum waits ready, and takes a lost one's place: nothing is started or imported by then."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, ROOT, START_S, Job, Node
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Lab
from tests.lab.wait import eventually

DDP = ROOT / "examples" / "stock_ddp.py"

# From the loss to the line of the first step in which the spare took part: steps of 0.05 s, written one step late.
KILLED_BOUND_S = 0.8
# Silence must be noticed first; and where the leader is lost, by the next leader.
SILENT_BOUND_S = 1.5
ELECTION_S = 0.5
# Workers are forked warm; what is left is the end of the old ones, the meeting, the model, and an epoch of 0.05 s.
RESTARTED_BOUND_S = 3.5
STANDBY = "as many as are wanted; this node takes the place of the next one that is lost or leaves"


def values(cluster: EtcdCluster, prefix: str) -> list[bytes]:
    """Of all keys below `prefix`."""
    return [stands.value for stands in cluster.standing(prefix).values()]


def await_ready(one: Job, cluster: EtcdCluster, count: int) -> None:
    """In restart mode: until so many nodes can start workers at once."""
    agents = JobKeys(one.job_id).agents
    eventually(
        lambda: [pb.Agent.FromString(v).ready for v in values(cluster, agents)] == [True] * count,
        DEADLINE_S,
        lambda: f"{count} nodes ready",
        0.02,
    )


def two_and_a_spare(job: MakeJob, lab: Lab, nodes: str) -> tuple[Job, list[Node]]:
    """The leader, another, and a spare whose worker is ready. etcd is on a host of its own."""
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes=nodes)
    started = [one.start(lab.hosts[1])]
    started[0].await_line("this node leads")
    started.append(one.start(lab.hosts[2]))
    one.await_world(2)
    started.append(one.start(lab.hosts[3]))
    members = JobKeys(one.job_id).members
    eventually(lambda: len(values(cluster, members)) == 3, DEADLINE_S, "a spare that is ready", 0.02)
    one.await_step(one.step + 10)
    assert {line.world_size for line in one.ledger.lines[-20:]} == {2}, "it is left out"
    return one, started


def taken_over_after_s(one: Job, lost_at: float, generation: int) -> float:
    """From the loss to the first step by two workers in a later generation."""

    def found() -> float:
        return next(
            (x.time for x in one.ledger.lines if x.generation > generation and x.world_size == 2), 0.0
        )

    return eventually(found, DEADLINE_S, "a step with the spare", 0.02) - lost_at


@pytest.mark.parametrize(
    ("how", "leads", "nodes"),
    [
        ("kill_all", False, "2:2"),
        pytest.param("kill_all", True, "1:2", marks=pytest.mark.long),
        ("power_off", False, "2:2"),
        pytest.param("kill_all", True, "2:2", marks=pytest.mark.long),
        pytest.param("kill_all", False, "1:2", marks=pytest.mark.long),
        pytest.param("power_off", False, "1:2", marks=pytest.mark.long),
        pytest.param("power_off", True, "2:2", marks=pytest.mark.long),
    ],
)
def test_a_spare_takes_over_when_a_host_is_lost(
    job: MakeJob, make_lab: MakeLab, how: str, leads: bool, nodes: str
) -> None:
    one, started = two_and_a_spare(job, make_lab(4), nodes)
    lost = started[0 if leads else 1]
    before = one.ledger.lines[-1].generation
    assert lost.host is not None
    lost_at = time.time()  # the lab's hosts share this machine's clock, and so do the ledger's lines
    getattr(lost.host, how)()
    took_s = taken_over_after_s(one, lost_at, before)
    bound_s = KILLED_BOUND_S if how == "kill_all" else SILENT_BOUND_S + leads * ELECTION_S
    whose = "the leader's host" if leads else "a host"
    one.measured(f"{whose} lost by {how}, --nnodes {nodes}: first step with the spare", took_s, bound_s)
    one.finish([-9 if node is lost else 0 for node in started])
    one.check(finished=2)
    later = {line.world_size for line in one.ledger.lines if line.generation > before}
    assert later <= ({2} if nodes == "2:2" else {1, 2})
    assert started[2].says("is in force from step", "2 workers on 2 nodes (+h4")


def test_a_spare_that_is_not_needed_ends_with_the_job(job: MakeJob, make_lab: MakeLab) -> None:
    one, started = two_and_a_spare(job, make_lab(4), "2:2")
    one.finish()
    one.check(finished=2)
    assert {line.world_size for line in one.ledger.lines} == {2}
    assert started[2].says("succeeded")


def test_a_spare_says_that_it_waits_and_whose_place_it_takes(job: MakeJob, make_lab: MakeLab) -> None:
    one, (first, lost, spare) = two_and_a_spare(job, make_lab(4), "2:2")
    spare.await_line("waiting on standby: generation 2 has 2 nodes, ", STANDBY)
    assert not first.says("waiting on standby") and not lost.says("waiting on standby")
    assert lost.host is not None
    lost.host.kill_all()
    spare.await_line("generation 3 is in force", "2 workers on 2 nodes (+h4 -h3); lost global rank 1 on h3")
    one.finish([0, -9, 0])
    one.check(finished=2)
    assert not spare.says("waiting on standby", times=2), "it waits no more"


def test_a_spare_takes_over_in_restart_mode(job: MakeJob, make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    program = [str(DDP), "--epochs", "1000", "--pause", "0.05", "--checkpoint", str(tmp_path / "spiral.pt")]
    one = job(endpoints=cluster.endpoints, nodes="2:2", program=program)
    first = one.start(lab.hosts[1])
    await_ready(one, cluster, 1)  # so that it has rank 0
    second = one.start(lab.hosts[2])
    first.await_line("epoch 2 loss", "with 2 processes")
    spare = one.start(lab.hosts[3])
    await_ready(one, cluster, 3)
    spare.await_line("waiting on standby: ", STANDBY)
    starts = first.log.count("from epoch ")
    lost_at_s = time.monotonic()
    lab.hosts[2].kill_all()
    first.await_line("from epoch ", "with 2 processes", times=starts + 1)
    at = first.log.rindex("from epoch ")
    eventually(lambda: " loss " in first.log[at:], DEADLINE_S, lambda: first.log, 0.02)
    took_s = time.monotonic() - lost_at_s
    one.measured("restart mode, host killed: first epoch with the spare", took_s, RESTARTED_BOUND_S)
    assert not first.says("with 1 processes")
    assert "from epoch 0" not in first.log[at:], "it goes on from the checkpoint"
    for node in (first, spare):
        node.process.kill()
    for node in (first, second, spare):
        assert node.process.wait(10) == -9
    one.check_nothing_left()


@pytest.mark.long
def test_what_a_spare_trained_before_it_was_left_out_begins_no_job(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path
) -> None:
    """All holders are lost before a checkpoint: the job begins anew, with a new worker in the spare's slot."""
    lab = make_lab(3)
    options = ["--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "100000"]
    one = job(
        endpoints=lab.etcd(lab.hosts[0]).endpoints,
        nodes="1:2",
        options=[*options, "--rdzv-conf", "holder_timeout=2"],
    )
    first = one.start(lab.hosts[1])
    first.await_line("this node leads")
    second = one.start(lab.hosts[2])
    one.await_world(2, after_step=9)
    (spare,) = second.workers
    one.scale(lab.hosts[0], "1:1")
    one.await_world(1)
    assert second.workers == [spare]
    assert first.host is not None
    newest = one.ledger.lines[-1].generation
    first.host.kill_all()
    second.await_line("the job begins anew", deadline_s=START_S)
    eventually(
        lambda: any(line.generation > newest for line in one.ledger.lines), START_S, "a step of a new worker"
    )
    assert spare not in second.workers
    one.finish([-9, 0])
    one.check(finished=1)
    assert one.ledger.lines[0].step == 1 and {r.resumed_at_step for r in one.ledger.resumptions} == {0}
