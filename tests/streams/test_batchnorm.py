"""Batch normalization over the workers of a job, on a device: in order, and without a wait of the host for each
layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_core import parallel
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce
from bagua_core.communication.communicator import Communicator, Lane, Pending
from bagua_core.communication.nccl.nccl_line import NcclOperation
from bagua_core.communication.reduction.buffer_broadcast import broadcast_buffers
from bagua_core.sync_batchnorm import SyncBatchNorm
from tests.streams.modelled_ranks import ModelledRank, train, waits_of_steps, world
from tests.streams.watching import clean, install

LAYERS = 3


def normalized(momentum: float | None = 0.1) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(70, 20)]
    for _ in range(LAYERS):
        layers += [nn.BatchNorm1d(20, momentum=momentum), nn.Tanh(), nn.Linear(20, 20)]
    return nn.Sequential(*layers, nn.Linear(20, 3))


def workers(momentum: float | None = 0.1, has_buffers: bool = False) -> list[ModelledRank]:
    def build() -> nn.Module:
        return SyncBatchNorm.convert(normalized(momentum))

    members = world(2, GradientAllreduce, build, frozenset({Lane.STATISTICS}))
    for member in members:
        member.rank.model.broadcast_buffers = has_buffers
        for layer in member.rank.inner.modules():
            if isinstance(layer, SyncBatchNorm):
                layer._engine = member.rank.engine
    return members


@pytest.fixture(autouse=True)
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_waits_once_a_step_whatever_the_number_of_layers(momentum: float | None) -> None:
    members = workers(momentum)
    train(members)
    assert clean([m.device for m in members]) == []
    assert waits_of_steps(members) == [1] * 6, [m.device.host_waits for m in members]


def test_an_exchange_of_statistics_without_an_event_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclOperation, "_come_after_start", lambda operation: None)
    members = workers()
    train(members)
    assert any("unordered" in violation for violation in clean([m.device for m in members]))


def test_what_no_vote_comes_after_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    members = workers()
    for member in members:
        monkeypatch.setattr(type(member.rank.engine), "is_final", True)
    train(members, steps=1)
    assert waits_of_steps(members) == [2 * LAYERS + 1] * 2


def test_buffers_that_a_vote_follows_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    members = workers(has_buffers=True)
    train(members, steps=2)
    assert clean([m.device for m in members]) == []
    assert waits_of_steps(members) == [1] * 4

    def with_a_wait(
        buffers: list[torch.Tensor], communicator: Communicator, wait: Callable[[Pending], None], **_: bool
    ) -> None:
        broadcast_buffers(buffers, communicator, wait, vote_follows=False)

    monkeypatch.setattr(parallel, "share_buffers", with_a_wait)
    members = workers(has_buffers=True)
    train(members, steps=1)
    assert min(waits_of_steps(members)) == 2
