"""A tensor that a model has under several names is written once, and read under each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from bagua_core.checkpoint import dcp_reader, main
from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from tests.core.elastic.checkpoint.test_job_checkpoints import (
    NO_LIMIT,
    ended,
    settings,
    workers,
    written_by,
)
from tests.core.elastic.state.trainings import Net


def tied(net: Net) -> Net:
    """Gives a layer and a buffer further names, as language models do with the embedding and the last layer."""
    net.head = nn.Linear(4, 6, bias=False)
    net.head.weight = net.first.weight
    net.again = net.last
    net.register_buffer("seen", net.norm.running_mean)
    return net


def tied_by_memory(net: Net) -> Net:
    """Gives a parameter and buffers the memory of others, as tensors of their own."""
    net.head = nn.Linear(4, 6, bias=False)
    net.head.weight.data = net.first.weight.data
    net.register_buffer("seen", net.norm.running_mean.view(-1))
    net.register_buffer("whole", net.last.weight.detach())
    return net


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net]:
    return saved_with(tied, tmp_path)


def saved_with(tie: Callable[[Net], Net], tmp_path: Path) -> tuple[Path, Net]:
    (worker,) = here = workers(settings(tmp_path / "saved"), 1)
    net = tie(worker.training.model)
    worker.enter()
    worker.training.train(2, seed=1)
    worker.state.step_committed(1)
    worker.checkpoints.step_aside(worker.record, 0, 1, NO_LIMIT)
    assert written_by(here) == [True]
    ended(here)
    return tmp_path / "saved", net


def same(one: Net, other: Net) -> bool:
    tensors = other.state_dict()
    return all(torch.equal(tensor, tensors[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("tie", [tied, tied_by_memory])
def test_torch_loads_it_into_a_tied_model(tie: Callable[[Net], Net], tmp_path: Path) -> None:
    directory, net = saved_with(tie, tmp_path)
    other = tie(Net())
    weights = get_model_state_dict(other)
    dcp.load({"model": weights}, storage_reader=dcp_reader(str(directory)), no_dist=True)
    other.load_state_dict(weights)
    assert same(net, other)


def test_an_exported_model_has_all_names_and_each_tensor_once(
    saved: tuple[Path, Net], tmp_path: Path
) -> None:
    directory, net = saved
    assert main(["export", str(directory), str(tmp_path / "out.pt")]) == 0
    (model,) = torch.load(tmp_path / "out.pt", weights_only=True)["models"]
    assert model["head.weight"].data_ptr() == model["first.weight"].data_ptr()
    del model["mask"]  # which the model does not save
    other = tied(Net())
    other.load_state_dict(model, strict=True)
    assert same(net, other)
    (found,) = catalogue.find(LocalStorage(directory))
    assert not any("head" in entry.name for header in found.headers for entry in header.entries)
