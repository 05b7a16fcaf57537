"""Replicas of two workers on real agents, cut by `fully_shard`: losses, joins, the ledger, equal shards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_core.communication.compressed.compressed_sum import LEAST_ELEMENTS
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import START_S, Job, Node
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("train_sharded.py")
SAMPLES, EPOCHS = 576, 2
END_S = 90.0
NEXT_STEP_BOUND_S = 2.5  # about 0.4 s, and a slow step of pace.py rests for a second
WIDTH = 1024


def sharded(job: MakeJob, nodes: str, script: Sequence[str] = (), **keywords: Any) -> Job:
    return job(
        **{"samples": SAMPLES, **keywords},
        epochs=EPOCHS,
        file=SCRIPT,
        script=script,
        nodes=nodes,
        options=("--replica-size", "2"),
    )


def check(one: Job, *, finished: int, equal: bool = True, shards: int = 2) -> None:
    """The ledger is exact, with one line a replica; equal shards hold the same bits; no process is left."""
    found = one.ledger
    assert found.check(one.samples, EPOCHS) == []
    ends = one.ends()
    assert len(ends) == finished, ends
    for shard in range(shards):
        own = [end for end in ends if end["shard"] == shard]
        assert len(own) == finished // shards, ends
        for what in ("parameters", "optimizer") if equal else ("parameters",):
            assert len({end[what] for end in own}) == 1, (what, ends)
    one.check_nothing_left()


def check_sums(one: Job) -> None:
    """Of each sample once in each epoch, whichever shard computed it."""
    ends = one.ends()
    of_shard = {shard: {tuple(e["sums"]) for e in ends if e["shard"] == shard} for shard in (0, 1)}
    assert all(len(sums) == 1 for sums in of_shard.values()), of_shard
    found = sum(numbers for sums in of_shard.values() for numbers, _ in sums)
    assert found == EPOCHS * sum(range(one.samples)), of_shard


def await_missed(nodes: Sequence[Node]) -> None:
    """An agent prints the loss when its worker has reported the first step after it."""
    why = "the host was lost in the training of others"
    eventually(
        lambda: all(node.missed_a_peer for node in nodes), START_S, lambda: f"{why}\n{nodes[0].log}", 0.05
    )


def dies(how: str, at: str = "1,1", step: int = 12) -> list[str]:
    return ["--dies", how, "--dies-in", str(step), "--at", at]


def test_a_host_is_lost_and_its_replica_comes_back(job: MakeJob, make_lab: MakeLab) -> None:
    """3 replicas of 2 on 6 hosts: each replica spans two of them."""
    lab = make_lab(7)
    # twice the samples: late steps of pace.py rest for longer than the bound
    one = sharded(job, "2:6", samples=2 * SAMPLES, endpoints=lab.etcd(lab.hosts[0]).endpoints)
    nodes = [one.start(host) for host in lab.hosts[1:]]
    before = one.await_world(3, after_step=9)
    trained = [node.workers for node in nodes]
    lost = nodes[5]
    assert lost.host is not None
    lost.host.kill_all()
    after = one.await_world(2, after_step=before)
    mate = eventually(lambda: _ended_its_part(nodes[:5]), START_S, "the mate's part is ended", 0.05)
    one.await_step(after + 2)
    one.measured("the survivors' next step", one.largest_gap_s(before, after + 2), NEXT_STEP_BOUND_S)
    survivors = [node for node in nodes[:5] if node is not mate]
    for node in survivors:
        await_missed([node])
        assert node.workers == trained[nodes.index(node)], "a survivor goes on in its process"
    one.start(lab.hosts[6])
    again = one.await_world(3, after_step=after)
    one.await_step(again + 2)
    one.finish([0] * 5 + [-signal.SIGKILL, 0], deadline_s=END_S)
    check(one, finished=6)


@pytest.mark.parametrize(
    ("algorithm", "arguments", "script", "samples"),
    [
        ("ByteGrad", '{"hierarchical": false}', [], SAMPLES),
        # rounds of four local steps, so slow ones: the job must not end before the other host has joined
        ("LocalSGD", '{"sync_every": 4, "unit": "round"}', ["--step-s", "0.6"], 4 * SAMPLES),
    ],
)
def test_a_host_is_lost_under_other_algorithms_and_another_joins(
    job: MakeJob, make_lab: MakeLab, algorithm: str, arguments: str, script: list[str], samples: int
) -> None:
    """3 replicas of 2, each on a host: what shards exchange passes between hosts."""
    lab = make_lab(5)
    one = sharded(
        job,
        "2:3",
        ["--algorithm", algorithm, "--algorithm-arguments", arguments, *script],
        samples=samples,
        endpoints=lab.etcd(lab.hosts[0]).endpoints,
    )
    nodes = [one.start(host, slots=2) for host in lab.hosts[1:4]]
    before = one.await_step(one.await_world(3) + 1)
    trained = [node.workers for node in nodes[:2]]
    lab.hosts[3].kill_all()
    after = one.await_world(2, after_step=before)
    await_missed(nodes[:2])
    assert [node.workers for node in nodes[:2]] == trained, "the survivors go on in their processes"
    one.start(lab.hosts[4], slots=2)
    again = one.await_world(3, after_step=after)
    one.await_step(again + 1)
    one.finish([0, 0, -signal.SIGKILL, 0], deadline_s=END_S)
    check(one, finished=6, equal=algorithm == "ByteGrad")


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.long) for how in ("forward", "gather", "vote")), "scatter"]
)
def test_a_worker_dies(job: MakeJob, how: str) -> None:
    one = sharded(job, "1", dies(how))
    node = one.start(slots=4)
    node.await_line(f"dies in the {how} of step 12", deadline_s=END_S)
    alone = one.await_world(1, after_step=12)
    again = one.await_world(2, after_step=alone)
    one.await_step(again + 2)
    one.finish(deadline_s=END_S)
    check(one, finished=4)


@pytest.mark.parametrize(("cut", "shards"), [("tensor", 2), pytest.param("both", 4, marks=pytest.mark.long)])
def test_meshes_of_tensor_parallelism(job: MakeJob, cut: str, shards: int) -> None:
    """Two replicas; one dies within a step, and comes back."""
    one = job(
        samples=SAMPLES,
        epochs=EPOCHS,
        file=SCRIPT,
        script=["--cut", cut, *dies("forward")],
        nodes="1",
        options=("--replica-size", str(shards)),
    )
    node = one.start(slots=2 * shards)
    node.await_line("dies in the forward of step 12", deadline_s=END_S)
    again = one.await_world(2, after_step=one.await_world(1, after_step=12))
    one.await_step(again + 2)
    one.finish(deadline_s=END_S)
    check(one, finished=2 * shards, shards=shards)


def test_a_script_fails_on_one_shard(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    """Of two nodes with one shard each: the job ends with that error, and the other shard shows no error of its own."""
    one = sharded(job, "2", dies("raises", at="0,1"), endpoints=etcd.endpoint)
    nodes = [one.start(), one.start()]
    codes = [node.process.wait(END_S) for node in nodes]
    assert codes == [1, 1]
    cause, mate = sorted(nodes, key=lambda n: n.says("[rank1]: Traceback"), reverse=True)
    assert cause.says("[rank1]: ValueError: a mistake of the script")
    # its script's collective fails, unless the job has ended before
    ended = mate.says("a collective of replica", "so another shard has ended")
    assert ended or mate.says("shard 1 of its replica", "is gone"), mate.log
    assert "[rank0]: Traceback" not in mate.log and "RuntimeError" not in mate.log, mate.log
    for node in nodes:
        assert node.says(
            "failed: 1 script failure, none allowed: global rank ", "ValueError: a mistake of the script"
        )
    one.check_nothing_left()


@pytest.mark.parametrize("how", ["vote", pytest.param("reduction", marks=pytest.mark.long)])
def test_a_shard_alone_loses_an_outcome(job: MakeJob, how: str) -> None:
    """The vote: its replica goes back, and copies the step from the other. The lane's reduction: all go back."""
    one = sharded(job, "1", dies("misses-vote" if how == "vote" else "misses-lane", at="0,1"))
    node = one.start(slots=4)
    node.await_line(f"missed the {how} of step 12", deadline_s=END_S)
    one.await_step(16)
    one.finish(deadline_s=END_S)
    assert node.says("step 12 in generation 2 did not happen", times=2 if how == "vote" else 4)
    check(one, finished=4)


@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [
        pytest.param("ByteGrad", "{}", marks=pytest.mark.long),
        pytest.param("LocalSGD", '{"sync_every": 4}', marks=pytest.mark.long),
        pytest.param("StreamingDiLoCo", '{"sync_every": 8, "delay": 2}', marks=pytest.mark.long),
    ],
)
def test_other_algorithms_across_replicas(job: MakeJob, algorithm: str, arguments: str) -> None:
    one = sharded(
        job,
        "1",
        ["--algorithm", algorithm, "--algorithm-arguments", arguments, "--evaluates", *dies("scatter")],
    )
    node = one.start(slots=4)
    node.await_line("dies in the scatter of step 12", deadline_s=END_S)
    again = one.await_world(2, after_step=one.await_world(1, after_step=12))
    one.await_step(again + 2)
    one.finish(deadline_s=END_S)
    check(one, finished=4, equal=algorithm == "ByteGrad")


@pytest.mark.parametrize(
    ("algorithm", "arguments", "least", "most"),
    [
        # a byte a value to the owners of the sums, and half of it back
        ("ByteGrad", '{"hierarchical": false}', 1.0, 2.0),
        # half a byte a value
        (
            "LocalSGD",
            '{"sync_every": 4, "unit": "round", "compress": "int4", "outer_optimizer": "nesterov"}',
            0.5,
            1.0,
        ),
    ],
)
def test_what_replicas_send_each_other_is_compressed(
    job: MakeJob, algorithm: str, arguments: str, least: float, most: float
) -> None:
    """least, most: bytes sent for each value of a shard in a step or a round; uncompressed it is 4."""
    script = ["--algorithm", algorithm, "--algorithm-arguments", arguments, "--width", str(WIDTH)]
    is_rounds = "round" in arguments
    one = sharded(job, "1", [*script, *dies("scatter")], samples=2 * SAMPLES if is_rounds else SAMPLES)
    node = one.start(slots=4)
    node.await_line("dies in the scatter of step 12", deadline_s=END_S)
    again = one.await_world(2, after_step=one.await_world(1, after_step=12))
    one.await_step(again + 2)
    one.finish(deadline_s=END_S)
    check(one, finished=4, equal=not is_rounds)
    for end in one.ends():
        assert end["values"] >= LEAST_ELEMENTS, "or nothing would be compressed"
        assert least < end["most_sent_bytes"] / end["values"] < most, end


@pytest.mark.long
def test_a_joiner_replica_dies_while_it_heals(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = sharded(job, "1:2", endpoints=etcd.endpoint)
    first = one.start(slots=2)
    one.await_step(3)
    holds = one.directory / "holds"  # once: `kill` would end each successor too, and so the job
    holds.mkdir()
    (holds / "heal.swap").touch()
    second = one.start(slots=2, failpoints=f"heal.swap=hold:{holds}#1")
    (held,) = eventually(lambda: [*holds.glob("heal.swap.[0-9]*")], END_S, "slot 1 is to swap its state in")
    os.kill(int(held.suffix[1:]), signal.SIGKILL)
    second.await_line("worker in slot 1 ended: killed by SIGKILL", deadline_s=END_S)
    second.await_line("worker in slot 0 ended: its replica is over")
    one.await_step(one.step + 2)
    assert first.process.is_running
    one.finish([0, 0], deadline_s=END_S)
    eventually(lambda: not one._left(), 10.0, "all processes end")
    assert one.ledger.check(SAMPLES, EPOCHS) == []


def test_a_host_is_cut_off_while_its_mate_waits_for_it(job: MakeJob, make_lab: MakeLab) -> None:
    """No connection is reset: the mate hangs in torch's collective, and its agent ends it."""
    lab = make_lab(5)
    one = sharded(job, "2:4", ["--sums"], endpoints=lab.etcd(lab.hosts[0]).endpoints)
    nodes = [one.start(host) for host in lab.hosts[1:]]
    before = one.await_world(2, after_step=9)
    nodes[3].host.cut()  # type: ignore[union-attr]
    after = one.await_world(1, after_step=before)
    over = eventually(lambda: _ended_its_part(nodes[:3]), START_S, "the mate's part is ended", 0.05)
    one.await_step(after + 2)
    one.measured("the survivors' next step", one.largest_gap_s(before, after + 2), 20.0)
    nodes[3].host.heal()  # type: ignore[union-attr]
    again = one.await_world(2, after_step=after)
    one.await_step(again + 2)
    one.finish(deadline_s=END_S)
    assert over.process.returncode == 0
    check(one, finished=4)
    check_sums(one)


def test_a_host_is_back_at_once_and_finds_its_mate_killed(job: MakeJob, make_lab: MakeLab) -> None:
    """Its worker's collective ends with a closed connection, which is no failure of the script: none is allowed."""
    lab = make_lab(5)
    one = sharded(job, "2:4", endpoints=lab.etcd(lab.hosts[0]).endpoints)
    nodes = [one.start(host) for host in lab.hosts[1:]]
    before = one.await_world(2, after_step=9)
    nodes[3].host.cut()  # type: ignore[union-attr]
    eventually(lambda: _ended_its_part(nodes[:3]), START_S, "the mate's part is ended", 0.01)
    nodes[3].host.heal()  # type: ignore[union-attr]
    after = one.await_world(1, after_step=before)
    again = one.await_world(2, after_step=after)
    one.await_step(again + 2)
    one.finish(deadline_s=END_S)
    check(one, finished=4)


def _ended_its_part(nodes: Sequence[Node]) -> Node | None:
    return next((node for node in nodes if node.says("ended: its replica is over")), None)


def test_a_node_leaves_and_takes_its_replica_along(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = sharded(job, "1:2", ["--evaluates", "--sums"], endpoints=etcd.endpoint)
    first, second = one.start(slots=2), one.start(slots=2)
    before = one.await_world(2, after_step=5)
    second.send(signal.SIGTERM)
    assert second.process.wait(END_S) == 0, second.log
    after = one.await_world(1, after_step=before)
    one.await_step(after + 2)
    one.finish([0, 0], deadline_s=END_S)
    assert not first.says("did not happen"), "a leave costs no step"
    check(one, finished=2)
    check_sums(one)


@pytest.mark.long
def test_a_worker_dies_in_a_collective_between_two_epochs(job: MakeJob) -> None:
    one = sharded(job, "1", ["--evaluates", *dies("evaluation", step=SAMPLES // 24)])
    node = one.start(slots=4)
    node.await_line("dies in the evaluation", deadline_s=END_S)
    alone = one.await_world(1, after_step=SAMPLES // 24)
    again = one.await_world(2, after_step=alone)
    one.await_step(again + 1)
    one.finish(deadline_s=END_S)
    check(one, finished=4)


@pytest.mark.parametrize(("how", "step"), [("sum", 12), ("evaluation", SAMPLES // 24)])
def test_sums_of_the_script_across_replicas(job: MakeJob, how: str, step: int) -> None:
    """One of three replicas is lost while the others wait for it in torch's all_reduce in a step, or in its all_gather
    between two epochs. Its replica comes back."""
    one = sharded(job, "1", ["--sums", *dies(how, step=step)])
    node = one.start(slots=6)
    node.await_line(f"dies in the {how} of step {step}", deadline_s=END_S)
    again = one.await_world(3, after_step=one.await_world(2, after_step=step), deadline_s=END_S)
    one.await_step(again + 1)
    one.finish(deadline_s=END_S)
    assert how == "sum" or node.says("epoch 0: the sums of 2 replicas are equal")
    assert node.says("epoch 1: the sums of 3 replicas are equal")
    check(one, finished=6)
    check_sums(one)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_workers_are_killed_at_any_time(job: MakeJob, seed: int) -> None:
    """Of three replicas on one node, one loses a worker again and again, at odd moments of a step."""
    chooser = random.Random(seed)
    one = sharded(job, "1", ["--step-s", "0.05", "--evaluates", "--sums"], samples=4800)
    node = one.start(slots=6)
    step = one.await_world(3, deadline_s=END_S)
    for _ in range(5):
        step = one.await_step(step + chooser.randrange(1, 4), deadline_s=END_S)
        time.sleep(chooser.random() * 0.1)  # any moment of a step will do
        chooser.choice(node.workers).kill()
        step = one.await_world(
            3, after_step=one.await_world(2, after_step=step, deadline_s=END_S), deadline_s=END_S
        )
    one.finish(deadline_s=END_S)
    check(one, finished=6)
    check_sums(one)
