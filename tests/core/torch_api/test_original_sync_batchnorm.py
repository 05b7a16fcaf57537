"""The original's SyncBatchNorm outside a wrapped model's step: statistics of all workers' samples there too."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bagua_core.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from tests.lab.launched import launch

RANK = Path(__file__).with_name("sync_batchnorm_rank.py")


def test_two_workers_without_a_wrapped_model(tmp_path: Path) -> None:
    ended = launch("--standalone", "--nproc-per-node", "2", str(RANK), str(tmp_path))
    assert ended.returncode == 0, ended.said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_alone_it_is_torchs() -> None:
    x = torch.randn(5, 3)
    torch.testing.assert_close(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))
