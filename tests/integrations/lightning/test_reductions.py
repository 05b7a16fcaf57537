"""Lightning's reductions within a step, of a worker that computes a filler."""

from __future__ import annotations

import copy
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bagua_core as bagua
from bagua_core.elastic.step import runtime

OTHER = torch.tensor([3.0, -5.0])


@pytest.mark.parametrize(
    ("name", "combine"),
    [
        ("sum", torch.add),
        ("min", torch.minimum),
        ("max", torch.maximum),
        ("product", torch.mul),
        ("mean", None),
    ],
)
@pytest.mark.parametrize("has_fillers", [False, True])
def test_a_fillers_value_is_left_out_of_a_reduction(
    monkeypatch: pytest.MonkeyPatch, has_fillers: bool, name: str, combine: Any
) -> None:
    from bagua_core.integrations.lightning import collectives

    def allreduce(own: torch.Tensor, op: Any = bagua.ReduceOp.SUM) -> torch.Tensor:
        if combine is None:
            return own + torch.cat([OTHER, torch.ones(1)])
        found: torch.Tensor = combine(own, OTHER)
        return found

    monkeypatch.setattr(runtime, "engine", lambda: SimpleNamespace(has_fillers=has_fillers))
    monkeypatch.setattr(bagua, "allreduce", allreduce)
    own = torch.tensor([1.0, 1.0])
    found = collectives.reduce(own, name)
    both = (own + OTHER) / 2 if combine is None else combine(own, OTHER)
    assert torch.equal(found, OTHER if has_fillers else both)


def test_a_metric_leaves_out_a_fillers_batch_and_keeps_what_it_accumulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    from bagua_core.integrations.lightning import collectives

    def gather(own: torch.Tensor, *, is_filler: bool) -> list[torch.Tensor]:
        other = torch.full_like(own, 8.0 if own.item() != 1.0 else 1.0)
        return [other] if is_filler else [own, other]

    monkeypatch.setattr(collectives, "gather_unequal", gather)
    engine = SimpleNamespace(has_fillers=False)
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    module = torch.nn.ModuleList([torchmetrics.SumMetric(dist_sync_on_step=True)])
    collectives.connect_metrics(module, lambda: (0, 2))
    metric = copy.deepcopy(module)[0]
    assert metric(2.0) == 10
    engine.has_fillers = True
    assert metric(3.0) == 8, "of the batch"
    assert metric.compute() == 2 + 3 + 8, "of both batches"
    alone = pickle.loads(pickle.dumps(metric))
    alone.update(4.0)
    assert alone.compute() == 2 + 3 + 4, "without a trainer"


def test_a_decision_counts_with_fillers(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua_core.integrations.lightning import BaguaStrategy

    others = [0]

    def allreduce(own: torch.Tensor, op: Any) -> torch.Tensor:
        combine = {bagua.ReduceOp.MIN: min, bagua.ReduceOp.MAX: max}[op]
        return torch.tensor(combine(own.item(), others[0]))

    monkeypatch.setattr(runtime, "engine", lambda: SimpleNamespace(has_fillers=True))
    monkeypatch.setattr(BaguaStrategy, "_is_alone", False)
    monkeypatch.setattr(BaguaStrategy, "root_device", torch.device("cpu"))
    monkeypatch.setattr(bagua, "allreduce", allreduce)
    strategy = BaguaStrategy.__new__(BaguaStrategy)
    for others[0], own in itertools.product((0, 1), (False, True)):
        assert strategy.reduce_boolean_decision(own, all=True) == (own and bool(others[0]))
        assert strategy.reduce_boolean_decision(own, all=False) == (own or bool(others[0]))
