"""Validation, early stopping, checkpoints and loggers of a Lightning trainer whose main worker is killed."""

from __future__ import annotations

from typing import Any

import pytest


def test_the_main_worker_is_killed_between_two_validations(lightning_job: Any) -> None:
    """A joiner evaluates before its first step too: in the trainer's sanity check, and as the script asks."""
    one = lightning_job("--validate", "--validate-before", epochs=3)
    node = one.start(slots=2)
    per_epoch = one.samples // 24
    one.await_step(per_epoch + 3)
    node.workers[0].kill()
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    ends = one.check_trainers(finished=2)
    assert {end["seen"] for end in ends} == {50.0}, "the samples of a validation, over all workers"
    assert {end["counted"] for end in ends} == {50.0}, "the same, by torchmetrics"
    assert [end["before"] for end in ends] == [[50.0, 50.0]] * 2, "before the training each has all samples"
    names = {path.name for path in (one.out / "checkpoints").iterdir()}
    assert names == {f"epoch={e}-step={(e + 1) * per_epoch}.ckpt" for e in range(3)}
    logs = list((one.out / "logs").rglob("metrics.csv"))
    assert len(logs) == 2, "the first main worker and the one after it"


@pytest.mark.long
def test_the_main_worker_is_lost_in_a_validation(lightning_job: Any) -> None:
    """The other one ends the validation, saves what the lost one would have saved, and goes on."""
    one = lightning_job("--validate", "--dies-in-validation", epochs=3)
    node = one.start(slots=2)
    node.await_line("killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    ends = one.check_trainers(finished=2)
    assert {end["seen"] for end in ends} == {50.0}, "the next validation is whole"
    assert len(list((one.out / "checkpoints").iterdir())) == 3
