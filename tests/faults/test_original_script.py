"""Scripts in the style of the original, whose only changed line is the import: what holds when a worker is lost.

Their loops mark no steps and take in no joiner, so a batch that was lost stays lost and a replacement goes; steps are
counted right all the same. With ElasticDataLoader they keep every promise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.printed import printed
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, START_S, Job
from tests.lab.wait import eventually

LOOP = Path(__file__).parents[1] / "core" / "torch_api" / "original_loop.py"
SAMPLES, EPOCHS, BATCH, WORKERS = 1200, 2, 12, 2
ITERATIONS = EPOCHS * SAMPLES // WORKERS // BATCH
LATE = "worker ends: it came when the others had begun"


def original(job: MakeJob, *words: str, **keywords: Any) -> Job:
    """A job of original_loop.py with these arguments."""
    program = [str(LOOP), "--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--batch", str(BATCH), *words]
    one = job(program=program, samples=SAMPLES, epochs=EPOCHS, **keywords)
    program += ["--out", str(one.out)]
    return one


def await_training(one: Job, iteration: int = 1, world_size: int = WORKERS) -> None:
    """Until a worker has done so many iterations and one among so many workers."""

    def done() -> bool:
        lines = [line.split() for path in one.out.glob("trained-*") for line in path.read_text().splitlines()]
        return any(int(n) >= iteration and int(world) == world_size for n, world in lines)

    eventually(done, START_S, f"iteration {iteration} of {world_size} workers", 0.05)


def lost_batches(one: Job) -> int:
    """Of the longest history of any node: each failed step is said by every worker that saw it fail."""
    said = [line for node in one.nodes for line in node.log.splitlines() if "did not happen" in line]
    return len({line.partition(" step ")[2].partition(" did")[0] for line in said})


def test_both_workers_train_every_batch_and_end_alike(job: MakeJob) -> None:
    given = {"last_call_timeout=60": "last_call_timeout=1", "8": str(WORKERS)}
    *options, _ = printed("docs/original-scripts.md", "--rdzv-conf", given)
    one = original(job, options=options)
    one.start()
    await_training(one)
    one.finish()
    ends = one.ends()
    assert len(ends) == WORKERS
    for end in ends:
        assert end["iterations"] == end["optimizer_steps"] == end["steps"] == ITERATIONS
        assert end["worlds"] == [WORKERS] and end["evaluated"] == [WORKERS] * EPOCHS
        assert end["lr"] == 1e-2 * 0.5**EPOCHS
    assert ends[0]["parameters"] == ends[1]["parameters"]
    one.check_nothing_left()


def test_a_lost_worker_costs_its_batch_and_is_not_replaced(job: MakeJob) -> None:
    one = original(job, "--step-s", "0.3")
    node = one.start(slots=WORKERS)
    await_training(one, 10)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    await_training(one, world_size=1)
    node.await_line(LATE)
    one.finish()
    (end,) = one.ends()
    assert end["slot"] == 0 and end["iterations"] == ITERATIONS
    assert end["worlds"] == [1, WORKERS] and end["evaluated"][-1] == 1
    assert end["lr"] == 1e-2 * 0.5**EPOCHS, "the script's own schedule goes by its iterations"
    lost = lost_batches(one)
    assert 1 <= lost <= 2, "the step that the loss broke, or that and the next"
    assert end["steps"] == end["optimizer_steps"] == ITERATIONS - lost
    one.check_nothing_left()


def test_an_algorithm_of_the_scripts_own_survives_a_loss(job: MakeJob) -> None:
    one = original(job, "--step-s", "0.3", "--algorithm", "own")
    node = one.start(slots=WORKERS)
    await_training(one, 5)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    await_training(one, world_size=1)
    one.finish()
    (end,) = one.ends()
    lost = lost_batches(one)
    assert lost >= 1
    assert end["iterations"] == ITERATIONS
    assert end["steps"] == end["optimizer_steps"] == ITERATIONS - lost
    one.check_nothing_left()


def test_with_the_elastic_loader_nothing_is_lost_and_the_replacement_trains(job: MakeJob) -> None:
    one = original(job, "--elastic")
    node = one.start(slots=WORKERS)
    one.await_step(20)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.await_world(WORKERS, after_step=one.await_world(1))
    assert not node.says(LATE)
    one.finish()
    ends = one.ends()
    assert len(ends) == WORKERS
    assert ends[0]["parameters"] == ends[1]["parameters"]
    assert {end["optimizer_steps"] for end in ends} == {one.ledger.steps}
    assert one.ledger.check(SAMPLES, EPOCHS) == []
    one.check_nothing_left()


def test_a_node_that_comes_later_does_nothing(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one = original(job, "--step-s", "1", endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    one.start(lab.hosts[0], slots=WORKERS)
    await_training(one)
    late = one.start(lab.hosts[1])
    late.await_line(LATE)
    one.finish()
    ends = one.ends()
    assert [(end["worlds"], end["steps"]) for end in ends] == [([WORKERS], ITERATIONS)] * WORKERS
    one.check_nothing_left()


SAVES = """
import argparse, os, pathlib, signal, time
import torch, bagua_core.torch_api as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--waits", action="store_true")
given = parser.parse_args()
out, agent_id = given.out, os.environ["BAGUA_AGENT_ID"]
bagua.init_process_group()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
save = torch.save

def save_or_meet_the_fault(states, path):
    try:
        with (out / "saving").open("x") as file:
            file.write(agent_id)
    except FileExistsError:
        return save(states, path)
    path.write_bytes(b"a half of it")
    if not given.waits:
        os.kill(os.getpid(), signal.SIGKILL)
    while not (out / "goes-on").exists():
        time.sleep(0.02)
    save(states, path)

torch.save = save_or_meet_the_fault
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
bagua.checkpoint.save_checkpoint(5, str(out / "saved"), model, optimizer)
assert bagua.checkpoint.load_checkpoint(str(out / "saved"), model, optimizer) == 5
(out / f"loaded-by-{agent_id}").touch()
"""


def test_the_next_rank_0_saves_if_rank_0_is_killed_while_it_saves(job: MakeJob, tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    program = [str(script)]
    one = job(program=program)
    program += ["--out", str(one.out)]
    node = one.start(slots=WORKERS)
    one.finish()
    assert node.says("worker in slot 0 ended: killed by SIGKILL") or node.says("in slot 1 ended: killed by")
    one.check_nothing_left()


@pytest.mark.long
def test_the_next_rank_0_saves_if_rank_0_is_cut_off_while_it_saves(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(3)
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    program = [str(script), "--waits"]
    waits = ["--rdzv-conf", f"last_call_timeout={START_S}"]
    one = job(program=program, endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", options=waits)
    program += ["--out", str(one.out)]
    for host in lab.hosts[1:]:
        one.start(host)
    saving = one.out / "saving"
    agent_id = eventually(lambda: saving.exists() and saving.read_text(), START_S, "rank 0 saves")
    cut = next(host for host in lab.hosts[1:] if str(agent_id).startswith(f"{host.name}-"))
    cut.cut()
    try:
        eventually(lambda: any(one.out.glob("loaded-by-*")), DEADLINE_S, "the next rank 0 has saved")
        (one.out / "goes-on").touch()
    finally:
        cut.heal()
    one.finish()
    assert [node.says("lost global rank 0 on", "the agent is gone") for node in one.nodes] == [True, True]
    assert not list((one.out / "saved").rglob("*.part"))
    one.check_nothing_left()


@pytest.mark.long
def test_a_host_that_was_given_up_and_comes_back_does_not_train_on(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    words = ("--step-s", "1", "--samples", "2400")
    waits = ["--rdzv-conf", f"last_call_timeout={START_S}"]
    one = original(job, *words, endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", options=waits)
    stays, goes = (one.start(host) for host in lab.hosts[1:])
    await_training(one, 3)
    lab.hosts[2].cut()
    await_training(one, world_size=1)
    lab.hosts[2].heal()
    goes.await_line("worker ends: the others went on without it")
    one.finish()
    (end,) = one.ends()
    assert end["iterations"] == 2 * ITERATIONS
    assert end["steps"] == end["optimizer_steps"] < end["iterations"]
    assert stays.process.returncode == 0
    one.check_nothing_left()


@pytest.mark.long
def test_a_job_that_is_too_small_without_a_lost_worker_fails_and_says_why(
    job: MakeJob, make_lab: MakeLab
) -> None:
    lab = make_lab(2)
    one = original(job, "--step-s", "1", endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="2:2")
    nodes = [one.start(host) for host in lab.hosts]
    await_training(one)
    nodes[1].workers[0].kill()
    assert [node.process.wait(START_S) for node in nodes] == [1, 1]
    assert nodes[0].says("LateWorkerError: it came when the others had begun", "too few to go on")
    one.check_nothing_left()


@pytest.mark.long
def test_a_worker_alone_that_fails_at_once_begins_again(job: MakeJob) -> None:
    """No worker of its generation lives, so it is not late."""
    one = original(job, "--raise-at", "0", options=["--max-restarts", "1"])
    node = one.start()
    node.await_line("a bad sample in iteration 0", "starting another")
    one.finish()
    (end,) = one.ends()
    assert end["iterations"] == ITERATIONS * WORKERS
    assert not node.says(LATE)
    one.check_nothing_left()


@pytest.mark.long
def test_a_model_wrapped_as_for_torch_needs_no_optimizer_named(job: MakeJob) -> None:
    one = original(job, "--parallel")
    node = one.start(slots=WORKERS)
    await_training(one, 10)
    node.workers[0].kill()
    node.await_line("worker in slot 0 ended: killed by SIGKILL")
    await_training(one, world_size=1)
    one.finish()
    (end,) = one.ends()
    assert end["slot"] == 1
    lost = lost_batches(one)
    assert lost >= 1
    assert end["steps"] == end["optimizer_steps"] == ITERATIONS - lost


def test_averaging_in_the_background_ends_with_the_script(job: MakeJob) -> None:
    one = original(job, "--algorithm", "async", "--algorithm-arguments", '{"sync_interval_ms": 0}')
    one.start(slots=WORKERS)
    await_training(one, 10)
    one.finish()
    assert [end["iterations"] for end in one.ends()] == [ITERATIONS] * WORKERS
    one.check_nothing_left()


@pytest.mark.long
def test_workers_that_build_different_models_are_told_so(job: MakeJob) -> None:
    one = original(job, "--differ")
    node = one.start(slots=WORKERS)
    assert node.process.wait(60) == 1
    assert node.says("ModelsDifferError: workers wrapped different models", "rank 0 has")
    one.check_nothing_left()
