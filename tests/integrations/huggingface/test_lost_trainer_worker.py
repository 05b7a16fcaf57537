"""A worker of transformers' Trainer is killed: the others continue in their processes, and its successor comes in."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.job import Job

SCRIPT = Path(__file__).with_name("train_transformers.py")
# 24 batches in an epoch, and one of a single row, in which one of two workers has no share
SAMPLES, EPOCHS = (
    577,
    2,
)

OWN = ("trained", "optimizer", "history")  # of a replica: what it logs has the norm of its gradients


@pytest.fixture
def trainer_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """trainer_job(*words for the script, options=): what still runs after the test is killed."""
    made: list[Job] = []

    def make(*script: str, options: Sequence[str] = ()) -> Job:
        program = [str(SCRIPT), "--out", str(tmp_path / "out")]
        program += ["--samples", str(SAMPLES), "--epochs", str(EPOCHS), *script]
        made.append(
            Job(
                tmp_path,
                samples=SAMPLES,
                epochs=EPOCHS,
                options=options,
                program=program,
                imports="transformers.trainer",
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.end()


def train_as_one_process(out: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """What transformers' own Trainer makes of it: the parameters at the end, and what it logged."""
    from transformers import Trainer, TrainingArguments, set_seed

    from tests.integrations.huggingface import train_transformers as script

    (out / "hurry").touch()
    set_seed(1)
    pace = script.Pace(out)
    trainer = Trainer(
        script.Tagger(),
        TrainingArguments(**script.arguments_for(out, EPOCHS)),
        train_dataset=script.Tokens(SAMPLES),
        eval_dataset=script.Tokens(50),
        compute_metrics=script.tokens_seen,
        callbacks=[pace],
    )
    trainer.train()
    return pace.trained, script.history_of(trainer.state)


def check_ends(one: Job, *, finished: int, has_equal_states: bool = True) -> list[dict[str, Any]]:
    """Every sample once, and workers that agree. has_equal_states: all replicas are equal after each step."""
    assert one.ledger.check(SAMPLES, EPOCHS) == [], "every sample once in an epoch"
    ends = one.ends()
    assert len(ends) == finished
    for what in ("loaded", "scheduler", "best", "best_step", *(OWN if has_equal_states else [])):
        assert len({str(end[what]) for end in ends}) == 1, f"{what} differ: {ends}"
    assert sum(end["is_main"] for end in ends) == 1
    updates = EPOCHS * math.ceil(SAMPLES / 24)
    assert {end["updates"] for end in ends} == {end["updates_of_scheduler"] for end in ends} == {updates}
    one.check_nothing_left()
    return ends


def check(one: Job, tmp_path: Path, *, finished: int) -> None:
    """As check_ends, and one process of transformers' own Trainer would have made the same."""
    ends = check_ends(one, finished=finished)
    alone = tmp_path / "alone"
    alone.mkdir()
    trained, history = train_as_one_process(alone)
    found = torch.load(one.out / "ends" / f"{ends[0]['worker']}.pt")
    for name, value in trained.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
    logged = ends[0]["history"]
    assert [line["step"] for line in logged] == [line["step"] for line in history], "each step is logged once"
    for line, expected in zip(logged, history, strict=True):
        assert line.keys() == expected.keys()
        for name in line.keys() - {"epoch", "total_flos"}:  # the epoch counts other batches there
            # one process has other batches of an evaluation, whose losses are means over unequally many tokens
            relative = 2e-2 if name == "eval_loss" else 1e-4
            assert line[name] == pytest.approx(expected[name], rel=relative), f"{name}: {line}, {expected}"


def test_the_main_worker_is_lost_and_another_joins(trainer_job: Callable[..., Job], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one = trainer_job("--tensorboard")
    node = one.start(slots=2)
    one.await_step(8)
    main, survivor = node.workers
    main.kill()
    node.await_line("worker in slot 0 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    check(one, tmp_path, finished=2)
    ends = one.ends()
    alone, joined = sorted(ends, key=lambda end: end["worker"] != survivor.worker_id)
    assert alone["worker"] == survivor.worker_id
    assert alone["steps_as_main"] and not joined["steps_as_main"]
    losses = sum("loss" in line or "eval_loss" in line for line in ends[0]["history"])
    # the main worker of the moment prints each; one that was just committed may be lost with it
    assert losses - 1 <= sum(node.log.count(f"{{'{name}': ") for name in ("loss", "eval_loss")) <= losses
    [folder] = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    assert folder.parent == one.out / "saved" / "runs", "both main workers log one run"
    shown = EventAccumulator(str(folder)).Reload().Scalars("train/loss")
    logged = [line["step"] for line in ends[0]["history"] if "loss" in line]
    assert len(logged) - 1 <= len(shown) <= len(logged) and {event.step for event in shown} <= set(logged)


@pytest.mark.long
def test_the_main_worker_is_lost_while_it_saves(trainer_job: Callable[..., Job], tmp_path: Path) -> None:
    """The next one saves that checkpoint anew: the best model, which is loaded at the end, is in it."""
    one = trainer_job("--dies-in-save")
    node = one.start(slots=2)
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    assert (one.out / "has-died").exists() and node.says("worker in slot 0 ended: killed by SIGKILL")
    check(one, tmp_path, finished=2)
    best = one.out / "saved" / "checkpoint-7"
    assert {end["best"] for end in one.ends()} == {str(best)}
    assert {path.name for path in best.iterdir()} >= {"optimizer.pt", "scheduler.pt", "trainer_state.json"}


@pytest.mark.long
def test_a_worker_is_lost_in_an_evaluation(trainer_job: Callable[..., Job]) -> None:
    """Its share is missing from that one. The others agree on what is left, and later evaluations are whole."""
    one = trainer_job("--dies-in-evaluation")
    node = one.start(slots=2)
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    assert (one.out / "has-died").exists() and node.says("worker in slot 1 ended: killed by SIGKILL")
    ends = check_ends(one, finished=2)
    rows = [line["eval_rows"] for line in ends[0]["history"] if "eval_rows" in line]
    assert rows[0] == 25 and set(rows[1:]) == {50}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["bytegrad", "low_precision_decentralized", "async"])
def test_a_worker_is_lost_with_other_algorithms(
    trainer_job: Callable[..., Job], tmp_path: Path, algorithm: str
) -> None:
    one = trainer_job("--algorithm", algorithm)
    node = one.start(slots=2)
    one.await_step(8)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    check_ends(one, finished=2, has_equal_states=algorithm == "bytegrad")


@pytest.mark.long
def test_a_stopped_job_goes_on_with_another_number_of_workers(
    trainer_job: Callable[..., Job], tmp_path: Path
) -> None:
    one = trainer_job(options=["--checkpoint-dir", str(tmp_path / "checkpoints")])
    node = one.start(slots=2)
    one.await_step(8)
    node.send(signal.SIGTERM)
    assert node.process.wait(40) == 143
    assert 8 <= one.step < SAMPLES // 24, "it was stopped in its first epoch"
    one.start(slots=1)
    one.finish(codes=[143, 0])
    assert one.ledger.lines[-1].world_size == 1
    check(one, tmp_path, finished=1)


@pytest.mark.long
def test_early_stopping_counts_over_a_loss_and_a_join(trainer_job: Callable[..., Job]) -> None:
    """The best evaluation is the first, at step 7; a worker that joins has not seen it, and stops with the other."""
    one = trainer_job("--patience", "5")
    node = one.start(slots=2)
    one.await_step(8)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    assert one.await_world(2, after_step=one.await_world(1)) <= 42
    one.finish()
    ends = one.ends()
    assert len(ends) == 2
    assert {end["updates"] for end in ends} == {7 + 5 * 7} == {one.ledger.steps}
    for what in ("trained", "loaded", "optimizer", "best_step", "history"):
        assert len({str(end[what]) for end in ends}) == 1, f"{what} differ: {ends}"
