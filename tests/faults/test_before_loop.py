"""Ranks and collectives before the loop are real: the job's first workers gather, later ones are answered."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, START_S, Job
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("asking_before_loop.py")
SAMPLES, EPOCHS = 720, 2  # steps for 48 s, unless hurried: a later worker may start slowly
STARTS_AGAIN = "the first workers start again"


class Asking:
    def __init__(self, job: MakeJob, directory: Path, *script: str, **more: object) -> None:
        self.out = directory / "asked"
        self.out.mkdir()
        words = ["--out", str(self.out), "--samples", str(SAMPLES), "--epochs", str(EPOCHS), *script]
        self.job: Job = job(program=[str(SCRIPT), *words], samples=SAMPLES, epochs=EPOCHS, **more)
        self.job.out = self.out

    def hold(self, name: str) -> None:
        (self.out / name).touch()

    def release(self, name: str) -> None:
        (self.out / name).unlink()

    @property
    def told(self) -> list[dict[str, Any]]:
        """What workers got before their loops, by rank."""
        found = [json.loads(path.read_text()) for path in self.out.glob("before-*.json")]
        return sorted(found, key=lambda one: one["rank"])

    def count(self, pattern: str) -> int:
        return len(list(self.out.glob(pattern)))

    def await_files(self, pattern: str, number: int = 1) -> None:
        eventually(lambda: self.count(pattern) >= number, 2 * START_S, f"{number} of {pattern}", 0.05)

    def check(self, ends: int) -> None:
        assert self.job.ledger.check(SAMPLES, EPOCHS) == []
        weights = [json.loads(p.read_text())["w"] for p in self.out.glob("end-*.json")]
        assert len(weights) == ends
        assert all(w == weights[0] for w in weights)
        self.job.check_nothing_left()


def test_the_first_workers_have_ranks_and_wait_for_each_other(job: MakeJob, tmp_path: Path) -> None:
    asking = Asking(job, tmp_path)
    asking.hold("hold-download")
    node = asking.job.start(slots=3)
    asking.await_files("downloads-*")
    node.await_line("before the loop: 3 workers on 1 node have their ranks")
    assert asking.told == []  # they wait in the barrier for rank 0
    asking.release("hold-download")
    asking.await_files("before-*.json", 3)
    asking.job.finish()
    assert [(one["rank"], one["world"], one["downloaded"]) for one in asking.told] == [
        (0, 3, True),
        (1, 3, False),
        (2, 3, False),
    ]
    assert all(one["found"] and one["total"] == 6 for one in asking.told)
    assert len({one["shared"]["run"] for one in asking.told}) == 1
    assert asking.count("downloads-*") == 1
    asking.check(3)


def test_a_later_worker_is_never_rank_0_and_gets_what_the_first_ones_got(
    job: MakeJob, tmp_path: Path, etcd: EmbeddedEtcd
) -> None:
    asking = Asking(job, tmp_path, nodes="1:2", endpoints=etcd.endpoint)
    first = asking.job.start(slots=2)
    asking.job.await_step(3, 2 * START_S)
    asking.job.start()
    asking.job.await_world(3, deadline_s=2 * START_S)
    asking.job.finish()
    assert [(one["rank"], one["world"]) for one in asking.told] == [(0, 2), (1, 2), (2, 3)]
    late, before = asking.told[2], asking.told[0]
    assert (late["shared"], late["total"], late["downloaded"]) == (before["shared"], 3, False)
    assert not first.says("did not happen")
    for epoch in range(EPOCHS):
        told = [json.loads(path.read_text()) for path in asking.out.glob(f"epoch-{epoch}-*.json")]
        assert len({one["named"] for one in told}) == 1 and None not in {one["named"] for one in told}
        assert len({one["ones"] for one in told}) == 1
    assert asking.count("epoch-*.json") in (5, 6)  # the later worker joins in the first epoch or the second
    asking.check(3)


def test_a_worker_that_takes_the_place_of_a_lost_one_is_answered_too(job: MakeJob, tmp_path: Path) -> None:
    asking = Asking(job, tmp_path)
    node = asking.job.start(slots=2)
    asking.job.await_step(3, 2 * START_S)
    lost = node.workers[0]  # rank 0: the other one answers
    lost.kill()
    asking.job.await_world(1)
    asking.job.await_world(2, asking.job.step, 2 * START_S)
    asking.job.finish()
    assert sorted(one["rank"] for one in asking.told) == [0, 1, 1]
    assert len({one["shared"]["run"] for one in asking.told}) == 1
    asking.check(2)


def test_a_loss_before_the_first_step_starts_all_of_them_again(job: MakeJob, tmp_path: Path) -> None:
    asking = Asking(job, tmp_path)
    asking.hold("hold-download")
    node = asking.job.start(slots=2)
    asking.await_files("downloads-*")
    node.await_line("have their ranks")
    before = {w.worker_id for w in node.workers}
    next(w for w in node.workers if w.slot == 1).kill()
    node.await_line(STARTS_AGAIN)
    asking.await_files("downloads-*", 2)  # rank 0 does it again
    node.await_line("have their ranks", times=2)
    assert before.isdisjoint(w.worker_id for w in node.workers)
    asking.release("hold-download")
    asking.job.finish(deadline_s=2 * DEADLINE_S)
    assert [(one["rank"], one["total"]) for one in asking.told] == [(0, 3), (1, 3)]
    asking.check(2)


def test_a_node_lost_before_the_first_step(job: MakeJob, tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    asking = Asking(job, tmp_path, nodes="1:2", endpoints=etcd.endpoint)
    asking.hold("hold-download")
    nodes = [asking.job.start(), asking.job.start()]
    asking.await_files("downloads-*")
    leads = next(n for n in nodes if n.says("this node leads"))
    leads.await_line("2 workers on 2 nodes have their ranks")
    lost = next(n for n in nodes if not n.says("this node leads"))
    lost.kill_agent()
    leads.await_line(STARTS_AGAIN)
    leads.await_line("1 worker on 1 node has its rank")
    asking.release("hold-download")
    leads.await_line("is in force", deadline_s=2 * START_S)
    asking.job.finish([-signal.SIGKILL if n is lost else 0 for n in nodes])
    asking.check(1)


def test_a_worker_lost_while_the_first_generation_is_entered(
    job: MakeJob, tmp_path: Path, etcd: EmbeddedEtcd
) -> None:
    """The minimum needs its successor, which the other one has to answer though it is in no generation."""
    asking = Asking(job, tmp_path, nodes="2", endpoints=etcd.endpoint)
    first = asking.job.start()
    second = asking.job.start(failpoints="entry.built=sleep:3")
    second.await_line("failpoint entry.built fired", deadline_s=2 * START_S)
    (lost,) = second.workers
    lost.kill()
    first.await_line("is in force", deadline_s=2 * START_S)
    asking.job.finish(deadline_s=2 * DEADLINE_S)
    assert len({one["shared"]["run"] for one in asking.told}) == 1
    asking.check(2)


def test_a_rank_that_skips_a_collective_before_the_loop_is_named(job: MakeJob, tmp_path: Path) -> None:
    asking = Asking(job, tmp_path, options=["--max-restarts", "3"])
    asking.hold("odd")
    node = asking.job.start(slots=2)
    assert node.process.wait(2 * START_S) == 1
    assert node.says("MismatchedCollective")
    assert node.says("asks for collective 0") or node.says("ranks disagree")
    asking.job.check_nothing_left()


def test_what_a_later_worker_can_not_have_is_said(job: MakeJob, tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    asking = Asking(job, tmp_path, "--gathers", nodes="1:2", endpoints=etcd.endpoint)
    first = asking.job.start()
    asking.job.await_step(3, 2 * START_S)
    late = asking.job.start()
    late.await_line("LateWorkerError", "allgather", deadline_s=2 * START_S)
    assert late.says("broadcast_object()")
    late.send(signal.SIGTERM)
    assert late.process.wait(DEADLINE_S) in (0, 128 + signal.SIGTERM)  # between two workers, or in one
    asking.job.hurry()
    assert first.process.wait(DEADLINE_S) == 0  # it does not count against the job
    asking.check(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_leaves_before_the_first_step(
    job: MakeJob, tmp_path: Path, number: signal.Signals
) -> None:
    asking = Asking(job, tmp_path)
    asking.hold("hold-download")
    node = asking.job.start(slots=2)
    asking.await_files("downloads-*")
    node.await_line("have their ranks")
    node.send(number)
    assert node.process.wait(DEADLINE_S) == 128 + number
    assert node.says("before the first step")
    asking.job.check_nothing_left()


def test_all_begin_again_from_a_checkpoint_when_no_worker_is_left(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    asking = Asking(job, tmp_path, options=["--checkpoint-dir", str(saved), "--checkpoint-every", "2"])
    node = asking.job.start(slots=2)
    asking.job.await_step(8, 2 * START_S)
    for worker in node.workers:
        worker.kill()
    node.await_line("have their ranks", times=2, deadline_s=2 * START_S)
    node.await_line("goes on from the checkpoint of step", deadline_s=2 * START_S)
    asking.job.finish(deadline_s=2 * DEADLINE_S)
    assert sorted(one["rank"] for one in asking.told) == [0, 0, 1, 1]
    asking.check(2)
