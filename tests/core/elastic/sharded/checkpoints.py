"""Checkpoints of sharded trainings for scenarios, written and read as a job's workers do it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from bagua_contract.checkpoint_every import CheckpointEvery
from bagua_contract.records import StateName
from bagua_core.elastic.checkpoint import restore
from bagua_core.elastic.checkpoint.assembly import Reader
from bagua_core.elastic.checkpoint.catalogue import RunState
from bagua_core.elastic.checkpoint.checkpointer import Checkpointer, Moment, Settings
from bagua_core.elastic.checkpoint.layout import NAMES
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.state.wanted_layouts import wanted_layouts
from tests.core.elastic.sharded.models import Training

NAME = StateName(1, 4, 0)
POSITION = {"epoch": 0, "batch": 4}


def shared() -> Path:
    """The folder that all worlds of one test run use."""
    return Path(os.environ["BAGUA_TEST_FOLDER"]).parent / "shared"


def write(
    root: Path, training: Training, shard: int = 0, shards: int = 1, replicas: int = 1, alone: str = ""
) -> None:
    """The parts of this shard, of all `replicas`: they hold equal states. alone: the id of the only one that writes,
    since its state differs from those of others."""
    said: list[str] = []
    script = training.registry.fingerprint()
    checkpointer = Checkpointer(
        Settings(LocalStorage(root), CheckpointEvery.decode("1")), said.append, lambda: script
    )
    checkpointer.run = 1

    def capture() -> dict[str, object]:
        return {**training.registry.capture(), NAMES: training.registry.parameter_names(), "history": "[]"}

    for part in range(replicas):
        moment = Moment("job", NAME, part, replicas, POSITION, bool(alone), shard, shards, alone)
        checkpointer.write(moment, capture)
        assert checkpointer.is_last_written(moment, 60.0) == "" and not said
    checkpointer.close(30.0)


def read(root: Path, training: Training, shard: int = 0, shards: int = 1) -> restore.Restored:
    """As one worker reads it: what it holds itself."""
    registry = training.registry
    restored = restore.read(
        LocalStorage(root),
        RunState(1, NAME),
        registry.fingerprint(),
        Reader(wanted_layouts(registry), shard, shards),
    )
    registry.restore(restored.state)
    return restored


def gathered(training: Training) -> dict[str, torch.Tensor]:
    """Whole tensors of parameters and the optimizer's state, gathered by torch: a collective."""
    found = dict(training.model.named_parameters())
    for key, values in training.optimizer.state_dict()["state"].items():
        found |= {f"{key}.{n}": v for n, v in values.items() if isinstance(v, torch.Tensor)}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}
