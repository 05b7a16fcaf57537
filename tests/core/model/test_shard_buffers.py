"""Buffers that forwards of shards change: their statistics one by one, other buffers as shard 0 leaves them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bagua_core.errors import NotDeterministicError
from bagua_core.model import shard_buffers
from bagua_core.model.shard_buffers import ShardBuffers


@dataclass(frozen=True)
class Shard:
    shard: int | None


class Counting(nn.Module):
    """Counts its forwards and remembers its last input, in buffers."""

    def __init__(self, silently: bool = False) -> None:
        super().__init__()
        self.silently = silently
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("constant", torch.arange(3.0))
        self.register_buffer("seen", torch.zeros(()))
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.silently:
            self.calls.data.add_(1)  # leaves the version
        else:
            self.calls += 1
        self.seen = x.sum().detach()  # another tensor, under the buffer's name
        found: torch.Tensor = self.layer(x)
        return found


def compute(buffers: ShardBuffers, module: nn.Module, shard: int | None, x: torch.Tensor) -> None:
    micro_batch = Shard(shard)
    buffers.forward_begins(micro_batch)
    module(x)
    buffers.shard_computed(micro_batch)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_wait_and_are_applied_as_the_layer_applies_them(momentum: float | None) -> None:
    layer, plain = (nn.BatchNorm1d(4, momentum=momentum) for _ in range(2))
    buffers = ShardBuffers(layer)
    batches = [torch.randn(5, 4) * 3 + 1 for _ in range(3)]
    for number, batch in enumerate(batches):
        compute(buffers, layer, number, batch)
        plain(batch)
    assert not layer.running_mean.any() and layer.num_batches_tracked == 0
    buffers.apply_statistics(buffers.rows())
    for own, want in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, want)


def test_evaluation_and_forwards_without_gradients_are_left_alone() -> None:
    layer = nn.BatchNorm1d(4)
    ShardBuffers(layer)
    with torch.no_grad():
        layer(torch.randn(5, 4))
    assert layer.num_batches_tracked == 1
    layer.eval()(torch.randn(5, 4))
    assert layer.num_batches_tracked == 1


def test_a_layer_that_computes_twice_in_a_shard_is_refused() -> None:
    layer = nn.BatchNorm1d(4)
    twice = nn.Sequential(layer, layer)
    buffers = ShardBuffers(twice)
    before = dict(layer._buffers)
    with pytest.raises(NotDeterministicError, match="computed twice in one shard"):
        compute(buffers, twice, 0, torch.randn(5, 4))
    assert all(layer._buffers[name] is buffer for name, buffer in before.items())
    assert layer.momentum == 0.1


def test_a_forward_that_raises_leaves_the_layer_as_it_was() -> None:
    layer = nn.BatchNorm1d(4)
    buffers = ShardBuffers(layer)
    before = dict(layer._buffers)
    with pytest.raises(ValueError, match="more than 1 value"):
        compute(buffers, layer, 0, torch.randn(1, 4))
    assert all(layer._buffers[name] is buffer for name, buffer in before.items())


def test_statistics_over_workers_are_refused() -> None:
    with pytest.raises(NotDeterministicError, match="SyncBatchNorm"):
        ShardBuffers(nn.Sequential(nn.SyncBatchNorm(3)))


@pytest.mark.parametrize("silently", [False, True])
def test_other_buffers_begin_each_shard_alike_and_end_as_shard_0_left_them(silently: bool) -> None:
    module = Counting(silently)
    buffers = ShardBuffers(module)
    for step in range(2):
        for number in range(3):
            compute(buffers, module, number, torch.full((1, 2), 10.0 * step + number))
            assert module.calls == step + 1
        assert buffers.has_changed
        buffers.others(of_first=True)
        buffers.forget()
        assert (module.calls.item(), module.seen.item()) == (step + 1, 20.0 * step)


def test_a_state_that_is_copied_in_is_what_the_next_shard_begins_with() -> None:
    module = Counting()
    buffers = ShardBuffers(module)
    buffers.forward_begins(Shard(None))
    buffers.shard_computed(Shard(None))
    module.calls.data.copy_(torch.tensor([7.0]))  # as a copy of the state writes
    buffers.forget()
    for number in range(2):
        compute(buffers, module, number, torch.ones(1, 2))
        assert module.calls == 8


def test_large_constants_are_compared_now_and_then_and_always_once_they_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_buffers, "LARGE_BYTES", 0)
    monkeypatch.setattr(shard_buffers, "AUDITED_STEPS", 1)
    module = Counting(silently=True)
    buffers = ShardBuffers(module)
    for step in range(3):
        for number in range(2):
            compute(buffers, module, number, torch.ones(1, 2))
            assert module.calls == step + 1
        buffers.others(of_first=True)
        buffers.forget()


def test_a_silent_write_to_a_buffer_that_is_not_contiguous() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("calls", torch.zeros(2, 4)[:, :2])
    buffers = ShardBuffers(module)
    for number in range(2):
        shard = Shard(number)
        buffers.forward_begins(shard)
        assert not module.calls.any()
        module.calls.data.add_(1)
        buffers.shard_computed(shard)
    assert buffers.has_changed
    assert buffers._kept["calls"].integers is None, "these would be copies"


def test_constant_buffers_are_not_sent() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2))
    buffers = ShardBuffers(module)
    compute(buffers, module, 0, torch.randn(1, 2))
    assert not buffers.has_changed and not buffers.is_empty


def test_a_buffer_that_changes_its_shape_in_a_forward_is_refused() -> None:
    """As an observer of single channels has no values before its first forward."""

    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("least", torch.tensor([]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.least.resize_(x.shape[1]).copy_(x.detach().min(0).values)
            return x

    module = Observed()
    buffers = ShardBuffers(module)
    compute(buffers, module, 0, torch.ones(3, 2))
    with pytest.raises(NotDeterministicError, match=r"^least got another shape .*\[0\] before, \[2\] now"):
        compute(buffers, module, 1, torch.ones(3, 2))
    module = Observed()
    module(torch.ones(3, 2))
    buffers = ShardBuffers(module)
    for shard in range(2):
        compute(buffers, module, shard, torch.ones(3, 2))
