"""Validation, early stopping, checkpoints and loggers of a Lightning trainer whose main worker is killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import bagua_core as bagua
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob


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


@pytest.fixture
def make_trainer() -> Iterator[Any]:
    """make_trainer(settings): a module that counts the samples it evaluates, and its trainer, in a world of one."""
    import lightning

    from bagua_core.integrations.lightning import BaguaStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.evaluated = 0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).mean()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            if not self.trainer.sanity_checking:
                self.evaluated += len(batch)

        test_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def make(**settings: Any) -> tuple[Any, Any]:
        more = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        more["enable_checkpointing"] = False
        strategy = BaguaStrategy()
        return Module(), lightning.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **more, **settings
        )

    bagua.shutdown()
    yield make
    bagua.shutdown()


ROWS: Any = torch.ones(20, 1)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_outside_of_the_training_takes_a_fraction_of_the_batches(
    make_trainer: Any, stage: str
) -> None:
    """It is not divided, so its length is known."""
    module, trainer = make_trainer(limit_val_batches=0.5, limit_test_batches=0.5)
    getattr(trainer, stage)(module, DataLoader(ROWS, batch_size=5), verbose=False)
    assert module.evaluated == 10


def test_a_fraction_of_the_batches_of_a_divided_validation_is_refused(make_trainer: Any) -> None:
    module, trainer = make_trainer(limit_val_batches=0.5)
    loader = DataLoader(ROWS, batch_size=5)
    with pytest.raises(UnsupportedInElasticJob, match=r"limit_val_batches=0\.5.* give a number of batches"):
        trainer.fit(module, loader, loader)


class Own(BatchSampler):
    """Of the script."""


@pytest.mark.parametrize("is_own", [False, True])
def test_a_validation_that_is_not_divided_takes_a_fraction_of_the_batches(
    make_trainer: Any, is_own: bool
) -> None:
    module, trainer = make_trainer(limit_val_batches=0.5, use_distributed_sampler=is_own)
    loader = DataLoader(ROWS, batch_size=5)
    own = DataLoader(ROWS, batch_sampler=Own(SequentialSampler(ROWS), 5, False))
    trainer.fit(module, loader, own if is_own else loader)
    assert module.evaluated == 10
