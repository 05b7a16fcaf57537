"""A trainer with a time limit (max_time, or a Timer), without a job.

Tests import the framework themselves: every lane of a run imports this module, which would cost each 1.5 s.
"""

from __future__ import annotations

import time
from typing import Any

import pytest


def trainer(**settings: Any) -> Any:
    import lightning

    from bagua_core.integrations.lightning import BaguaStrategy

    made = lightning.Trainer(
        strategy=BaguaStrategy(),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        **settings,
    )
    made.strategy._lightning_module = lightning.LightningModule()
    return made


def test_a_step_that_is_rolled_back_takes_the_time_that_it_took() -> None:
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.trainer.states import RunningStage

    from bagua_core.integrations.lightning.trainer_state import TrainerState

    timers, states = [], []
    for spent_s in (1e6, 5e7):
        own = trainer(max_time="01:00:00:00")
        [timer] = [callback for callback in own.callbacks if isinstance(callback, Timer)]
        timer._start_time[RunningStage.TRAINING] = time.monotonic() - spent_s
        timers.append(timer)
        states.append(TrainerState(own))
    at_resume_point = states[0].state_dict()
    timers[0]._start_time[RunningStage.TRAINING] -= 6e5
    for _ in range(2):
        states[0].load_state_dict(at_resume_point)
        assert 1.6e6 <= timers[0].time_elapsed() < 1.7e6
    states[0].load_state_dict(states[1].state_dict())
    assert 5e7 <= timers[0].time_elapsed() < 5.01e7, "the job's, on a worker that joins"


@pytest.mark.parametrize(("interval", "is_confirmed"), [("step", True), ("epoch", False), (None, False)])
def test_a_step_is_confirmed_where_a_time_limit_is_looked_at_behind_it(
    interval: str | None, is_confirmed: bool
) -> None:
    from lightning.pytorch.callbacks import Timer
    from torch.utils.data import DataLoader

    from bagua_core.integrations.lightning.train_batches import elastic
    from bagua_core.integrations.lightning.trainer_state import TrainerState
    from bagua_core.integrations.lightning.trainer_steps import TrainerSteps

    timer = Timer(duration="00:01:00:00", interval=interval) if interval else Timer()
    own = trainer(callbacks=[timer], max_epochs=2)
    own.fit_loop.max_batches = 10
    numbers: Any = list(range(20))
    batches = elastic(DataLoader(numbers, batch_size=2), None, workers=1)
    steps = TrainerSteps(own, batches, TrainerState(own), lambda: None)
    assert steps._is_followed_by_more() is is_confirmed
