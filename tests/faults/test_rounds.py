"""Jobs in rounds: a loss undoes no local step, and every sample is used once, whichever worker is lost at any time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Worker
from tests.faults.test_checkpoint import copy_of_newest, kill_whole
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("train_rounds.py")
SAMPLES, EPOCHS = 1600, 2  # in rounds of 160 samples


def in_rounds(job: MakeJob, *script: str, **keywords: Any) -> Job:
    return job(samples=SAMPLES, epochs=EPOCHS, file=SCRIPT, script=script, **keywords)


def check(one: Job, *, finished: int, lost: int = 0) -> list[int]:
    """The ledger is exact, all ends hold the same bits, and no worker at the end drew a sample that it did not commit.

    lost: samples that workers committed which ended before. Returns the samples of each end.
    """
    found = one.ledger
    assert found.check(SAMPLES, EPOCHS) == []
    ends = one.ends()
    assert len(ends) == finished, ends
    assert len({end["parameters"] for end in ends}) == 1, ends
    drawn = [end["drawn"] for end in ends]
    assert sum(drawn) + lost == SAMPLES * EPOCHS, "a local step was undone, or counted twice"
    one.check_nothing_left()
    return drawn


def await_batch_of(one: Job, worker: Worker) -> None:
    """It draws another one: it is within a round."""
    batches = one.out / "drawn" / worker.worker_id.replace("/", "_")
    before = batches.stat().st_size
    eventually(lambda: batches.stat().st_size > before, 20, "the worker draws a batch")


def committed(one: Job, generation: int, global_rank: int) -> int:
    return sum(
        len(line.samples)
        for line in one.ledger.lines
        if line.generation == generation and line.global_rank == global_rank
    )


def test_a_slow_worker_does_not_keep_the_round_open_and_leases_less_afterwards(job: MakeJob) -> None:
    # long beside what a busy machine adds to a step
    one = in_rounds(job, "--slow-slot", "1", "--sample-s", "0.006")
    one.start(slots=2)
    one.await_step(8)
    one.finish()
    slow, fast = sorted(check(one, finished=2))
    assert fast > 1.5 * slow
    first = [line for line in one.ledger.lines if line.step == one.ledger.lines[0].step]
    slow, fast = sorted(len(line.samples) for line in first)
    # no speed is known in the first round, so leases are equal: 80 samples of 160
    assert fast == 80 and slow < 80, "the slow worker's lease is used up"


@pytest.mark.parametrize("options", [(), ("--compress", "int4"), ("--async",)])
def test_a_worker_killed_within_a_round_loses_its_lease_alone(job: MakeJob, options: tuple[str, ...]) -> None:
    one = in_rounds(job, *options)
    node = one.start(slots=2)
    one.await_step(3)
    generation = one.ledger.lines[-1].generation
    victim = node.workers[1]
    await_batch_of(one, victim)
    victim.kill()
    node.await_line("was not averaged")
    again = one.await_world(2, after_step=one.await_world(1))
    one.await_step(again + 2)
    one.finish()
    check(one, finished=2, lost=committed(one, generation, 1))
    assert all(end.get("averages", 1) for end in one.ends()), "no average came in"


@pytest.mark.parametrize("options", [(), ("--async",)])
def test_a_worker_killed_within_the_first_round_undoes_no_local_step_of_the_others(
    job: MakeJob, options: tuple[str, ...]
) -> None:
    one = in_rounds(job, "--sync-every", "50", "--sample-s", "0.01", *options)
    node = one.start(slots=3)
    drawn = one.out / "drawn"
    eventually(lambda: drawn.is_dir() and len(list(drawn.iterdir())) == 3, 30, "every worker draws a batch")
    for worker in node.workers:
        await_batch_of(one, worker)
    node.workers[2].kill()
    node.await_line("round 0 in generation")
    one.await_world(3, after_step=one.await_world(2))
    one.finish()
    check(one, finished=3)


@pytest.mark.parametrize("options", [(), ("--async",)])
def test_a_host_is_lost_within_a_round_and_another_joins(
    job: MakeJob, make_lab: MakeLab, options: tuple[str, ...]
) -> None:
    lab = make_lab(5)
    cluster = lab.etcd(lab.hosts[0])
    one = in_rounds(job, "--sample-s", "0.004", *options, endpoints=cluster.endpoints, nodes="2:3")
    nodes = [one.start(host) for host in lab.hosts[1:4]]
    before = one.await_step(one.await_world(3) + 1)
    (victim,) = nodes[2].workers
    await_batch_of(one, victim)
    lab.hosts[3].kill_all()
    after = one.await_world(2, after_step=before)
    assert all(node.missed_a_peer for node in nodes[:2]), "the host was lost within a round"
    one.start(lab.hosts[4])
    again = one.await_world(3, after_step=after)
    one.await_step(again + 1)
    one.finish([0, 0, -9, 0])
    ranks = {
        g.number: p.global_rank for g in one.generations(cluster) if (p := g.placement_of(victim.worker_id))
    }
    lost = sum(committed(one, generation, rank) for generation, rank in ranks.items())
    check(one, finished=3, lost=lost)


@pytest.mark.parametrize(
    "point",
    [
        "reduction.done",
        "commit.after",
        *(
            pytest.param(p, marks=pytest.mark.long)
            for p in ("reduction.before", "commit.before", "ledger.before")
        ),
    ],
)
def test_a_worker_killed_around_the_vote(job: MakeJob, point: str) -> None:
    """Before the vote the survivor repeats the average. Behind it the round is the job's, and the survivor has it."""
    one = in_rounds(job)
    node = one.start(slots=2, failpoints=f"{point}=kill@5#1")
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    again = one.await_world(2, after_step=one.await_world(1))
    one.await_step(again + 2)
    one.finish()
    check(one, finished=2, lost=committed(one, 2, 1))


def test_a_survivor_that_misses_the_vote_copies_the_round(job: MakeJob) -> None:
    """The others have committed what it trained: it keeps its part, and copies the average."""
    one = in_rounds(job, "--misses-vote-in", "5")
    node = one.start(slots=3)
    node.await_line("missed the vote of round 5")
    again = one.await_world(3, after_step=6)
    one.await_step(again + 2)
    one.finish()
    check(one, finished=3)


def test_what_a_survivor_copies_has_no_local_step_of_a_holder_that_is_lost_next(job: MakeJob) -> None:
    """The holder had begun the next round. Its samples are leased again, so no model may have learned them."""
    one = in_rounds(job, "--misses-vote-in", "5")
    node = one.start(slots=2, failpoints="reduction.before=kill@6#0")
    node.await_line("missed the vote of round 5")
    node.await_line("worker in slot 0 ended: killed by SIGKILL")
    again = one.await_world(2, after_step=one.await_world(1))
    one.await_step(again + 2)
    one.finish()
    check(one, finished=2, lost=committed(one, 2, 0))
    assert [end["distance"] for end in one.ends()] == [0.0, 0.0], "a round begins with another model"


def test_a_worker_joins_where_each_round_is_confirmed(job: MakeJob) -> None:
    """It has no batch in its first round, and so does not ask for the confirmation itself."""
    one = in_rounds(job, "--confirms")
    node = one.start(slots=2)
    one.await_step(5)
    generation = one.ledger.lines[-1].generation
    node.workers[1].kill()
    again = one.await_world(2, after_step=one.await_world(1))
    one.await_step(again + 5)
    one.finish()
    check(one, finished=2, lost=committed(one, generation, 1))


def test_a_node_joins_and_another_leaves_in_the_middle_of_a_round(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = in_rounds(job, "--sync-every", "20", endpoints=etcd.endpoint, nodes="1:2")
    first = one.start()
    one.await_step(1)
    second = one.start()
    one.await_world(2)
    drawn = one.out / "drawn"
    batches = sum(file.stat().st_size for file in drawn.iterdir())
    eventually(
        lambda: sum(file.stat().st_size for file in drawn.iterdir()) > batches, 20, "a round is under way"
    )
    step = one.step
    first.send(signal.SIGTERM)
    assert first.process.wait(40) == 0
    alone = one.await_world(1, after_step=step)
    early = [line for line in one.ledger.lines if step < line.step < alone]
    assert sum(len(line.samples) for line in early) < 2 * 20 * 16, "the round was closed before its end"
    one.hurry()
    assert second.process.wait(40) == 0
    assert one.ledger.check(SAMPLES, EPOCHS) == []
    one.check_nothing_left()


@pytest.mark.long
def test_a_copy_that_takes_longer_than_hang_renew_costs_no_generation(job: MakeJob) -> None:
    """The joiner takes its first lease, and waits at the round's end for its copy; the others wait there for it."""
    hang = ["--rdzv-conf", "hang_notice=1,hang_renew=2"]
    one = in_rounds(job, "--chunk-s", "0.4", options=hang)
    node = one.start(slots=2)
    one.await_step(3)
    began = one.ledger.lines[-1].step
    node.workers[1].kill()
    before = one.await_world(2, after_step=one.await_world(1, after_step=began))
    assert one.largest_gap_s(before - 1, before) > 4.0, "the copy was slow"
    one.finish()
    assert not node.says("a new communicator for the same members")


def test_a_job_killed_whole_goes_on_from_its_checkpoint(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    one = in_rounds(job, options=["--checkpoint-dir", str(saved), "--checkpoint-every", "2"])
    one.start(slots=2)
    step = copy_of_newest(saved, tmp_path / "early")
    one.await_step(step + 1)
    kill_whole(one)
    again = one.start(slots=1)
    again.await_line("goes on from the checkpoint of step")
    one.hurry()
    assert again.process.wait(60) == 0
    assert one.ledger.check(SAMPLES, EPOCHS) == []


def test_batches_are_read_ahead_within_leases(job: MakeJob) -> None:
    one = in_rounds(job, "--loader-workers", "1", "--slow-slot", "1")
    one.start(slots=2)
    one.finish()
    check(one, finished=2)


def test_a_loss_in_the_last_average_of_a_script_that_breaks_its_loop(job: MakeJob) -> None:
    """The survivors repeat it before the collectives with which a training ends."""
    one = in_rounds(job, "--break-in", "3")
    node = one.start(slots=3, failpoints="reduction.before=kill@3#1")
    one.finish()
    assert node.says("was not averaged")
    ends = one.ends()
    assert len(ends) == 2 and len({end["parameters"] for end in ends}) == 1, ends
    assert one.step == 4
    one.check_nothing_left()


@pytest.mark.long
def test_the_last_checkpoint_has_no_local_step_of_a_round_that_waits(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Too few nodes are left to repeat the average, and then the last one leaves."""
    options = ["--checkpoint-dir", str(tmp_path / "saved")]
    one = in_rounds(job, nodes="2", endpoints=etcd.endpoint, options=options)
    first, second = one.start(), one.start()
    one.await_step(2)
    family = second.family
    second.kill_agent()
    for pid in Job.alive(family):
        os.kill(pid, signal.SIGKILL)
    first.await_line("was not averaged")
    first.send(signal.SIGTERM)
    first.process.wait(40)
    again = in_rounds(job, options=options)
    node = again.start()
    node.await_line("goes on from the checkpoint of step")
    again.hurry()
    assert node.process.wait(40) == 0
    assert [end["distance"] for end in again.ends()] == [0.0]
    again.check_nothing_left()
