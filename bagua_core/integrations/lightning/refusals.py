"""Refuses settings of a trainer that an elastic job cannot follow, each with one error that names the alternative."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging

from bagua_core.integrations.loader_settings import UnsupportedInElasticJob


def check_trainer(trainer: Any, has_trained: bool) -> None:
    """Checks the settings of the trainer. Raises UnsupportedInElasticJob."""
    for text in _reasons(trainer, has_trained):
        raise UnsupportedInElasticJob(f"strategy='bagua': {text}")


def check_divided_validation(trainer: Any) -> None:
    """Checks the settings of a validation that is divided among workers. Raises UnsupportedInElasticJob."""
    limit = trainer.limit_val_batches
    if isinstance(limit, float) and 0 < limit < 1:
        raise UnsupportedInElasticJob(
            f"strategy='bagua': limit_val_batches={limit}: the number of batches of a validation follows the workers; "
            "give a number of batches, or a torch.utils.data.Subset"
        )


def _reasons(trainer: Any, has_trained: bool) -> list[str]:
    """Returns a text for each setting that does not go with an elastic job, most general first; none if all do."""
    reasons = []
    if has_trained:
        reasons.append("this process has trained; call bagua_core.shutdown() before it trains again")
    if trainer.overfit_batches:
        reasons.append(f"overfit_batches={trainer.overfit_batches}: use a torch.utils.data.Subset")
    if trainer.limit_train_batches != 1.0 and trainer.max_epochs != 1:
        reasons.append(
            f"limit_train_batches={trainer.limit_train_batches} would end epochs that the job's data goes on with; use "
            "max_steps, or a torch.utils.data.Subset"
        )
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        reasons.append(
            "StochasticWeightAveraging keeps its count and its schedule in each worker, and a worker that joins has "
            "none of them; use WeightAveraging (Lightning 2.6), or an AveragedModel with bagua_core.register_state"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        reasons.append("reload_dataloaders_every_n_epochs: one loader defines the steps of a whole job")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        reasons.append("val_check_interval as a time: the workers' clocks differ; give a number of batches")
    return reasons
