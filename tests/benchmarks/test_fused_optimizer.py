"""The benchmark of optimizers compares what it says, on models of the sizes that their names say."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import fused_optimizer, optimizer_models
from benchmarks.fused_optimizer import Row


@pytest.mark.long
def test_the_quick_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert fused_optimizer.main(["--quick", "--threads", "1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 100 layers of 32")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(c[1], c[2]) for c in cells] == [
        (o, g) for g in ("kept", "new") for o in ("SGD", "AdamW", "RMSprop")
    ]
    for row in cells:
        named = dict(zip(fused_optimizer.HEAD, row, strict=True))
        assert float(named["loop, ms"]) > 0 and float(named["blocks, ms"]) > 0
        assert named["blocks against the loop"] == "same bits"
        assert (named["fused, ms"] == "-") == (named["optimizer"] == "RMSprop")


def test_the_models_are_those_that_their_names_say() -> None:
    counts = {
        name: sum(map(math.prod, shapes()))
        for name, shapes in optimizer_models.MODELS.items()
        if "base" in name or "B/" in name
    }
    assert counts == {"BERT-base": 109_482_240, "ViT-B/16": 86_567_656}


def test_ratios() -> None:
    seconds = {"loop": [3.0, 4.0, 5.0], "foreach": [2.0], "blocks": [1.0]}
    row = Row("m", "o", "kept", seconds, {"blocks": 0.0}, 600, [100.0, 200.0, 300.0])
    assert row.times_faster("blocks", ["loop"]) == 4.0
    assert row.times_faster("blocks", ["loop", "foreach"]) == 2.0
    assert row.times_faster("compiled", ["loop"]) is None
    assert row.memory_s == 3.0


def test_what_a_step_has_to_move() -> None:
    """AdamW reads parameters, gradients and two states, and writes all but gradients."""
    device = torch.device("cpu")
    make = fused_optimizer.ways_of("AdamW", torch.optim.AdamW, device)["loop"]
    one = fused_optimizer.Contestant(make, "100 layers of 32", device, keeps=True)
    one.step_s()
    assert one.moved_bytes() == 7 * sum(p.nbytes for p in one.parameters)
    assert fused_optimizer.bandwidth_bytes_s(device) > 1e8


def test_every_torch_optimizer_is_measured_or_left_out_with_a_reason() -> None:
    classes, left_out = fused_optimizer.optimizer_classes()
    ours = {n for n, k in classes.items() if k.__module__.startswith("torch.optim")}
    all_of_torch = {
        n
        for n in dir(torch.optim)
        if isinstance(getattr(torch.optim, n), type)
        and n not in ("Optimizer",)
        and issubclass(getattr(torch.optim, n), torch.optim.Optimizer)
    }
    assert (
        all_of_torch
        == (ours - {"SGD, momentum"})
        | {line.partition(":")[0] for line in left_out if ": " in line} & all_of_torch
    )
