"""A job of allowed sizes: a node that makes no size waits and says so, and takes a lost node's place at once."""

from __future__ import annotations

import base64
import signal
import time
from pathlib import Path

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import SAMPLES, START_S, Job
from tests.lab.etcd import EtcdCluster
from tests.lab.wait import eventually

KILLED = -signal.SIGKILL

# Restart mode, without torch: a start notes the number of workers, and runs until told to stop.
NOTES = """
import os, sys, time
from pathlib import Path

out = Path(sys.argv[1])
(out / f"start-{time.time_ns()}").write_text(os.environ["WORLD_SIZE"])
while not (out / "stop").exists():
    time.sleep(0.02)
"""


def spoil_sizes(one: Job, etcd: EtcdCluster) -> None:
    """Write a policy into the job's spec that no launcher writes."""
    key = JobKeys(one.job_id).spec
    values = [change.value for change in etcd.history(key) if change.value is not None]
    spec = pb.JobSpec.FromString(values[-1])
    spec.size_policy.sizes[:] = [4, 2]
    coded = [base64.b64encode(x).decode() for x in (key.encode(), spec.SerializeToString())]
    etcd.members[0].call("kv/put", key=coded[0], value=coded[1])


def test_two_or_four_nodes_and_never_three(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(5)
    etcd = lab.etcd(lab.hosts[0])
    cooldown_s = 3.0
    options = ("--sizes", "2,4", "--cooldown", f"{cooldown_s}")
    one = job(endpoints=etcd.endpoints, nodes="2:4", options=options, samples=2 * SAMPLES)
    first = one.start(lab.hosts[1])
    first.await_line("this node leads")
    second = one.start(lab.hosts[2])
    one.await_world(2)
    third = one.start(lab.hosts[3])
    why = "waiting for 1 more node to train on 4 (allowed sizes: 2, 4)"
    for node in (first, third):
        node.await_line(why)
    fourth = one.start(lab.hosts[4])
    four = one.await_world(4)

    # the spares are ready, so the cooldown alone delays their return
    asked_unix_s = time.time()
    one.scale(lab.hosts[0], "2:2")
    few = one.await_world(2, after_step=four)
    one.scale(lab.hosts[0], "2:4")
    four = one.await_world(4, after_step=few)
    again = next(line for line in one.ledger.lines if line.step == four)
    assert again.time >= asked_unix_s + cooldown_s

    spoil_sizes(one, etcd)
    for node in (first, third):
        node.await_line(f"passing over {JobKeys(one.job_id).spec}: sizes must be ascending numbers")
    with pytest.raises(AssertionError, match="its sizes can't be read"):
        one.scale(lab.hosts[0], "2:3")
    fourth.kill_agent()
    # the policy that was read before holds: one of the three that are left is spare
    one.await_world(2, after_step=four)
    second.kill_agent()
    one.await_step(one.step + 2)
    one.finish([0, KILLED, 0, KILLED])
    one.check(finished=2)
    assert {line.world_size for line in one.ledger.lines} == {2, 4}
    *_, last = records = one.generations(etcd)
    assert {g.node_count for g in records} == {2, 4}
    assert {m.node_name for m in last.members} == {lab.hosts[1].name, lab.hosts[3].name}, (
        "the spare took its place"
    )


def test_the_cooldown_delays_a_join_and_neither_a_leave_nor_the_loss_of_the_leader(
    job: MakeJob, make_lab: MakeLab
) -> None:
    lab = make_lab(4)
    etcd = lab.etcd(lab.hosts[0])
    # longer than every deadline of this test
    options = ("--start-size", "2", "--cooldown", "600")
    one = job(endpoints=etcd.endpoints, nodes="1:3", options=options)
    first = one.start(lab.hosts[1])
    first.await_line("waiting: 1 of 2 nodes")
    second = one.start(lab.hosts[2])
    both = one.await_world(2)
    third = one.start(lab.hosts[3])
    why = "waiting for the cooldown of 600 s since the last change"
    for node in (first, third):
        node.await_line(why)
    assert first.says("this node leads")
    joined = len(one.generations(etcd))
    first.kill_agent()
    one.await_world(1, after_step=both)
    # the next leader delays it too
    third.await_line(why, times=2)
    second.send(signal.SIGTERM)
    assert second.process.wait(10) == 0
    third.await_line("is in force from step")
    one.finish([KILLED, 0, 0])
    one.check(finished=1)
    after = one.generations(etcd)[joined:]
    assert {m.node_name for m in after[-1].members} == {lab.hosts[3].name}, "it takes the leaver's place"
    # the leaver has the state alone, so it stays beside the next one until this one has it
    assert [g.node_count for g in after] == [1, 2, 1]


def test_restart_mode_has_one_or_three_nodes_and_never_two(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(4)
    etcd = lab.etcd(lab.hosts[0])
    script = tmp_path / "notes.py"
    script.write_text(NOTES)
    options = ("--sizes", "1,3", "--start-method", "spawn")
    one = job(endpoints=etcd.endpoints, nodes="1:3", options=options, program=[str(script), str(tmp_path)])

    def await_starts(worlds: str) -> None:
        def noted() -> bool:
            return "".join(p.read_text() for p in sorted(tmp_path.glob("start-*"))) == worlds

        eventually(noted, START_S, f"starts by so many workers: {worlds}")

    first = one.start(lab.hosts[1])
    await_starts("1")
    second = one.start(lab.hosts[2])
    for node in (first, second):
        node.await_line("waiting for 1 more node to train on 3 (allowed sizes: 1, 3)")
    third = one.start(lab.hosts[3])
    await_starts("1333")
    third.kill_agent()
    await_starts("13331")
    (tmp_path / "stop").touch()
    one.finish([0, 0, KILLED])
    assert [g.node_count for g in one.generations(etcd)] == [1, 3, 1]
    one.check_nothing_left()
