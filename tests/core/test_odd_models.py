"""Copies of a wrapped model, and models whose buffers are no plain memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bagua_core.elastic.state.model_tensors import ModelTensors
from bagua_core.errors import TrainingOver
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import in_process_world, run_ranks
from tests.core.wrapped_worker import Worker


def test_copies_and_pickled_forms_evaluate_and_train_no_job() -> None:
    """torch.optim.swa_utils copies the model that it is given, and scripts give the wrapped one, as with torch's."""
    worker = Worker()
    average = AveragedModel(worker.model, use_buffers=True)
    before = worker.weights()
    for _ in range(2):
        worker.train()
        average.update_parameters(worker.model)
    seen = torch.cat([p.detach().reshape(-1) for p in average.module.parameters()])
    assert not torch.equal(worker.weights(), before) and not torch.equal(seen, worker.weights())
    pickled = pickle.loads(pickle.dumps(worker.model))
    for other in (average.module, pickled, copy.copy(worker.model)):
        assert type(other) is DistributedDataParallel and other.is_detached and other.training
        with torch.no_grad():
            assert torch.equal(other(torch.ones(1, 4)), other.module(torch.ones(1, 4)))
        with other.no_sync(), pytest.raises(TrainingOver, match="it is a copy"):
            other(torch.ones(1, 4))
    assert copy.copy(worker.model).module is worker.model.module is not pickled.module
    assert list(average.state_dict()) == ["n_averaged", "module.module.weight", "module.module.bias"]
    assert worker.engine.models == [worker.model]


class Odd(nn.Module):
    """Buffers whose elements share memory, are conjugated lazily, or are no vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("base", torch.ones(1, 3))
        self.register_buffer("wide", self.base.expand(5, 3))
        self.register_buffer("turned", torch.full((3,), 1 + 2j).conj())
        self.register_buffer("minus", torch.full((3,), 1 + 2j).conj().imag)
        self.register_buffer("count", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def test_buffers_of_odd_memory_are_shared_and_rolled_back_as_others() -> None:
    members = [Worker(c, Odd) for c in in_process_world(2)]
    with torch.no_grad():
        for number, worker in enumerate(members):
            for name in ("base", "turned", "minus"):
                getattr(worker.model.module, name).mul_(2 + number)
    run_ranks(members, lambda w: w.train())
    first, second = (dict(w.model.module.named_buffers()) for w in members)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(second["wide"], torch.full((5, 3), 2.0))
    assert second["wide"].data_ptr() == second["base"].data_ptr(), "still the same memory"

    tensors = ModelTensors(members[1].model.module)
    tensors.snapshot(watches=True)
    second["base"].mul_(7)
    second["turned"].mul_(7)
    tensors.roll_back()
    assert all(torch.equal(first[name], second[name]) for name in first)
