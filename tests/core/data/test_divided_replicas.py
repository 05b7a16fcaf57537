"""Samples of a replica are divided among its workers, and unequal parts are weighted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.replica_parts import ReplicaParts
from bagua_core.elastic.replica import refusals
from bagua_core.model.backward_begin import UnscalableOutputs, scale_gradients
from bagua_core.sync_batchnorm import SyncBatchNorm
from tests.core.data.fake_job import FakeEngine


class Mesh:
    """One dimension of a replica's mesh, as torch's DeviceMesh shows it."""

    def __init__(self, rank: int, size: int, ndim: int = 1) -> None:
        self._rank, self._size, self.ndim = rank, size, ndim

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def parts(divide: Any, shard: int, size: int) -> ReplicaParts:
    made = ReplicaParts(divide)
    engine = FakeEngine()
    engine.shard = (shard, size)
    made.join(engine)
    return made


@pytest.mark.parametrize("count", [0, 1, 2, 7, 12])
def test_parts_are_disjoint_and_cover_and_their_weights_average_to_one(count: int) -> None:
    workers = [parts(True, shard, 3) for shard in range(3)]
    assert [i for worker in workers for i in worker.of(range(count))] == list(range(count))
    for worker in workers:
        part, own = worker.weights(count)
        # of a mean over own samples, averaged over the workers: each sample counts 1 / count
        assert not count or part / 3 == pytest.approx(own) == pytest.approx(
            len(worker.of(range(count))) / count
        )


def test_all_get_the_same_where_asked_and_by_coordinate_of_a_mesh() -> None:
    assert parts(False, 1, 2).of([3, 4, 5]) == [3, 4, 5] and parts(False, 1, 2).place == (0, 1)
    assert parts(Mesh(1, 2), 2, 4).of([3, 4, 5, 6]) == [5, 6]
    with pytest.raises(ValueError, match="a mesh of 2 dimensions"):
        ReplicaParts(Mesh(0, 2, ndim=2))
    with pytest.raises(TypeError, match="divide_in_replica='data' is neither"):
        ReplicaParts("data")


@pytest.mark.parametrize("batch", [8, 6, 2])
def test_the_loaders_of_a_replica_serve_its_share_once(batch: int) -> None:
    served = []
    for shard in range(4):
        engine = FakeEngine()
        engine.shard = (shard, 4)
        loader = ElasticDataLoader(TensorDataset(torch.arange(8)), batch, engine=engine)
        served.append([(x.tolist(), engine.begun[-1].part, loader.has_share) for (x,) in loader])
    used: list[int] = []
    for own in zip(*served, strict=True):
        used += [index for samples, _, has_share in own if has_share for index in samples]
        assert sum(part for _, part, _ in own) == pytest.approx(4.0)
        assert all((part == 0) == (not has_share) for _, part, has_share in own)
    assert sorted(used) == list(range(8))


def test_a_part_scales_every_gradient_of_what_the_outputs_were_made_of() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = {"loss": (weight * 3).sum(), "others": [weight * 2]}
    scale_gradients(outputs, 0.5)
    (outputs["loss"] + outputs["others"][0].sum()).backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.5, 2.5]
    with pytest.raises(UnscalableOutputs, match="a set, holds no tensor"):
        scale_gradients(set(), 0.5)


@pytest.mark.parametrize(
    ("averaged", "over"), [({}, "over no workers"), ({"weight": 2}, "over 2 workers"), ({"weight": 4}, "")]
)
def test_samples_are_divided_where_gradients_are_averaged(
    monkeypatch: pytest.MonkeyPatch, averaged: dict[str, int], over: str
) -> None:
    monkeypatch.setattr(refusals, "is_sharded", lambda _: True)
    monkeypatch.setattr(refusals, "workers_averaged", lambda _: averaged)
    layer = torch.nn.Linear(2, 2, bias=False)
    if not over:
        refusals.check_divided([layer], 4)
        return
    with pytest.raises(refusals.NotForReplicas, match=rf"parameter weight .* {over}, but 4 workers"):
        refusals.check_divided([layer], 4)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(refusals.NotForReplicas, match=r"parameter weight is trained and not sharded"):
        refusals.check_divided([torch.nn.Linear(2, 2)], 2)
    with pytest.raises(refusals.NotForReplicas, match=r"layer 0 is a SyncBatchNorm.*use torch.nn.BatchNorm"):
        refusals.check_divided([torch.nn.Sequential(SyncBatchNorm(2, affine=False))], 2)
    refusals.check_divided([torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False))], 2)
    refusals.check_scaled(1)
    with pytest.raises(refusals.NotForReplicas, match="2 models"):
        refusals.check_scaled(2)
