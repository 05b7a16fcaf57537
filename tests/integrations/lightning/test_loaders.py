"""What the strategy makes of a script's loaders and settings, without a job.

Tests import the framework themselves: every lane of a run imports this module, which would cost each 1.5 s.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from bagua_core.communication.step_interface import StepPlan
from bagua_core.integrations.evaluation_batches import SharedBatches, shared
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob

DATA: Any = list(range(20))


@given(samples=st.integers(1, 60), batch_size=st.integers(2, 9), world_size=st.integers(1, 6))
def test_an_evaluation_is_divided_into_equally_many_batches(
    samples: int, batch_size: int, world_size: int
) -> None:
    shares = [
        list(SharedBatches(range(samples), batch_size, lambda r=rank: (r, world_size)))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in shares}) == 1
    assert all(0 < len(batch) <= batch_size for batches in shares for batch in batches)
    times = 1 if samples >= world_size else world_size
    assert Counter(s for batches in shares for batch in batches for s in batch) == Counter(
        list(range(samples)) * times
    )


@given(samples=st.integers(1, 60), batch_size=st.integers(1, 9), world_size=st.integers(1, 6))
def test_batches_of_all_workers_one_behind_the_other_are_the_order_of_the_data(
    samples: int, batch_size: int, world_size: int
) -> None:
    """What a gather of each batch returns, so that scripts find an example by its place."""
    if samples < world_size:
        return  # each worker takes all of them
    shares = [
        list(SharedBatches(range(samples), batch_size, lambda r=rank: (r, world_size)))
        for rank in range(world_size)
    ]
    gathered = [sample for one in zip_longest(*shares, fillvalue=[]) for batch in one for sample in batch]
    assert gathered == list(range(samples))
    most = -(-samples // (world_size * batch_size))
    assert all(len(batches) in (most, most - (batch_size == 1)) for batches in shares)
    assert all(0 < len(batch) <= batch_size for batches in shares for batch in batches)
    totals = [sum(map(len, batches)) for batches in shares]
    assert max(totals) - min(totals) <= 1


def test_an_evaluation_follows_the_workers_of_its_beginning() -> None:
    place = [(0, 1)]
    batches: Any = shared(DataLoader(DATA, batch_size=5), lambda: place[0])
    assert torch.cat(list(batches)).tolist() == DATA
    place[0] = (1, 2)
    assert torch.cat(list(batches)).tolist() == DATA[5:10] + DATA[15:20]


@pytest.mark.parametrize("has_generator", [False, True])
def test_a_random_order_of_an_evaluation_is_the_same_on_all_workers(has_generator: bool) -> None:
    """Whose generators are in different states, a joiner's for one."""
    found, states = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(rank) if has_generator else torch.default_generator
        sampler = RandomSampler(DATA, generator=generator if has_generator else None)
        states.append(generator.get_state())
        found += [s for batch in SharedBatches(sampler, 5, lambda r=rank: (r, 2)) for s in batch]
        assert torch.equal(generator.get_state(), states[rank]), (
            "the script's own random numbers are as before"
        )
    assert not torch.equal(*states)
    assert sorted(found) == DATA and found != DATA


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_evaluation_with_a_distributed_sampler_is_divided_once(shuffle: bool) -> None:
    parts = []
    for rank in range(2):
        sampler: Any = DistributedSampler(DATA, 2, rank, shuffle=shuffle)
        batches: Any = shared(DataLoader(DATA, batch_size=5, sampler=sampler), lambda r=rank: (r, 2))
        parts += torch.cat(list(batches)).tolist()
    assert sorted(parts) == DATA
    assert (parts != DATA[:5] + DATA[10:15] + DATA[5:10] + DATA[15:]) is shuffle


def test_a_distributed_sampler_with_an_order_of_its_own_is_refused() -> None:
    class OwnOrder(DistributedSampler[int]):
        def __iter__(self) -> Any:
            return iter([3, 1])

    with pytest.raises(UnsupportedInElasticJob, match="OwnOrder, a DistributedSampler"):
        shared(DataLoader(DATA, batch_size=5, sampler=OwnOrder(DATA, 2, 0)), lambda: (0, 2))


def test_workers_evaluate_parts_of_one_random_selection() -> None:
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, num_samples=12))
        batches: Any = shared(loader, lambda r=rank: (r, 2))
        parts += torch.cat(list(batches)).tolist()
    assert len(set(parts)) == 12


def test_a_train_loader_keeps_its_settings() -> None:
    from bagua_core.integrations.lightning.train_batches import elastic

    given_loader = DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True, collate_fn=list)
    loader = elastic(given_loader, None, workers=3).loader
    assert (loader.global_batch_size, loader.shuffle, loader.drop_last) == (12, True, True)
    assert elastic(DataLoader(DATA, batch_size=4), 6, workers=3).loader.global_batch_size == 6


@pytest.mark.parametrize(
    "sampler", [WeightedRandomSampler([1.0] * 5 + [0.0] * 15, 12), RandomSampler(DATA, num_samples=12)]
)
def test_a_sampler_of_the_script_gives_the_order(sampler: Any) -> None:
    from bagua_core.integrations.lightning.train_batches import elastic

    loader = elastic(DataLoader(DATA, batch_size=4, sampler=sampler), None, workers=1).loader
    assert loader.total_steps(1) == 3
    drawn = set(loader.samples_of({"epoch": 0, "batch": 0}, StepPlan(1, 0, 0, 1), 0))
    assert drawn and (drawn <= set(range(5)) or isinstance(sampler, RandomSampler))


def test_a_stream_has_no_batch_before_the_trainer_begins() -> None:
    """The trainer reads ahead when it sets up its loops, and a draw from the loader would begin a step."""
    from bagua_core.integrations.lightning.train_batches import elastic

    batches = elastic(DataLoader(Endless(), batch_size=2), None, workers=2)
    assert batches.loader.global_batch_size == 4
    assert list(batches) == []
    with pytest.raises(TypeError, match="Endless is a stream"):
        len(batches)


class Own(BatchSampler):
    """Of the script."""


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        ([1, 2], "list"),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), "DistributedSampler"),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), "list as batch_sampler"),
        (DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 2, False)), "Own as batch_sampler"),
        (DataLoader(Endless(), batch_size=None), "Endless, a stream"),
    ],
)
def test_loaders_that_no_elastic_job_can_have_are_refused(loader: Any, named: str) -> None:
    from bagua_core.integrations.lightning.train_batches import elastic

    with pytest.raises((UnsupportedInElasticJob, TypeError), match=named):
        elastic(loader, None, 1)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"limit_train_batches": 0.5, "max_epochs": 2}, "limit_train_batches=0.5"),
        ({"overfit_batches": 2}, "overfit_batches=2"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"val_check_interval": "00:00:01:00", "check_val_every_n_epoch": None}, "val_check_interval"),
    ],
)
def test_settings_that_no_elastic_job_can_have_are_refused(setting: dict[str, Any], named: str) -> None:
    import lightning

    from bagua_core.integrations.lightning import BaguaStrategy
    from bagua_core.integrations.lightning.refusals import check_trainer

    trainer = lightning.Trainer(
        strategy=BaguaStrategy(),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        **setting,
    )
    with pytest.raises(UnsupportedInElasticJob, match=named):
        check_trainer(trainer, has_trained=False)
    with pytest.raises(UnsupportedInElasticJob, match=r"bagua_core\.shutdown\(\)"):
        check_trainer(trainer, has_trained=True)


def test_a_callback_whose_state_no_joiner_could_have_is_refused() -> None:
    from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging

    from bagua_core.integrations.lightning.refusals import check_trainer

    settings = {"overfit_batches": 0, "limit_train_batches": 1.0, "reload_dataloaders_every_n_epochs": 0}
    trainer = SimpleNamespace(callbacks=[EarlyStopping("loss")], **settings)
    check_trainer(trainer, has_trained=False)
    trainer.callbacks.append(StochasticWeightAveraging(1e-2))
    with pytest.raises(UnsupportedInElasticJob, match=r"StochasticWeightAveraging .* use WeightAveraging"):
        check_trainer(trainer, has_trained=False)


def test_the_name_is_registered_with_its_arguments() -> None:
    import lightning

    from bagua_core.integrations.lightning import BaguaStrategy

    trainer = lightning.Trainer(strategy="bagua", accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy, BaguaStrategy)
    assert trainer.world_size == 1, "a world of one until the job has workers"
    with pytest.raises(TypeError, match="hierarchicall"):
        BaguaStrategy("bytegrad", hierarchicall=True)


def test_workers_run_the_script_as_it_was_started() -> None:
    from bagua_core.integrations.lightning.launcher import launch_command

    start = [sys.executable, "-m", "bagua_launch", "--standalone", "--nproc-per-node", "2"]
    script = SimpleNamespace(__spec__=None)
    assert launch_command(2, ["/a/train.py", "--lr", "1"], script) == [*start, "/a/train.py", "--lr", "1"]
    module = SimpleNamespace(__spec__=SimpleNamespace(name="mine.__main__"))
    assert launch_command(2, ["/a/mine/__main__.py", "x"], module) == [*start, "-m", "mine", "x"]


@pytest.mark.parametrize(
    ("scheduling", "position", "done"),
    [
        (None, (0, 0), 0),
        (None, (0, 7), 2),
        (None, (2, 4), 9),
        (None, (3, 0), 12),
        ({1: 3, 2: 5}, (0, 7), 7),
        ({1: 3, 2: 5}, (1, 7), 12),
        ({1: 3, 2: 5}, (2, 6), 15),
    ],
)
def test_a_joiner_knows_how_often_the_job_has_stepped(
    scheduling: dict[int, int] | None, position: tuple[int, int], done: int
) -> None:
    """10 batches an epoch in groups of 3, of which the last has one batch; or in groups as a scheduler says."""
    import lightning
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from bagua_core.integrations.lightning import BaguaStrategy
    from bagua_core.integrations.lightning.train_batches import elastic
    from bagua_core.integrations.lightning.trainer_state import TrainerState
    from bagua_core.integrations.lightning.trainer_steps import TrainerSteps

    trainer = lightning.Trainer(
        strategy=BaguaStrategy(),
        accelerator="cpu",
        devices=1,
        logger=False,
        accumulate_grad_batches=1 if scheduling else 3,
        callbacks=[GradientAccumulationScheduler(scheduling)] if scheduling else None,
    )
    trainer.strategy._lightning_module = lightning.LightningModule()
    batches = elastic(DataLoader(DATA, batch_size=2), None, workers=1)
    batches.loader.seek(dict(zip(("epoch", "batch"), position, strict=True)))
    TrainerSteps(trainer, batches, TrainerState(trainer), lambda: None)._put_optimizer_steps()
    assert trainer.global_step == done
