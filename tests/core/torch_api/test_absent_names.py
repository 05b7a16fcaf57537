"""Parts of the original that do not exist here say so when they are asked for, and what to use instead."""

from __future__ import annotations

import importlib

import pytest

import bagua_core.torch_api as bagua
from bagua_core import sync_batchnorm


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint",
        "model_parallel",
        "model_parallel.moe",
    ],
)
def test_modules(name: str) -> None:
    with pytest.raises(ImportError, match=r"is not offered by bagua_core\.torch_api: "):
        importlib.import_module(f"bagua_core.torch_api.{name}")


def test_other_names_are_no_names() -> None:
    assert not hasattr(bagua.contrib, "nonsense")


def test_batch_normalization_has_both_names() -> None:
    from torch import nn

    from bagua_core.torch_api.contrib.sync_batchnorm import SyncBatchNorm

    assert SyncBatchNorm is bagua.contrib.SyncBatchNorm
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    assert isinstance(converted, nn.Sequential)
    assert isinstance(converted[0], sync_batchnorm.SyncBatchNorm)


def test_fuse_optimizer_where_the_original_had_it() -> None:
    from bagua_core.torch_api.contrib.fuse.optimizer import fuse_optimizer as later
    from bagua_core.torch_api.contrib.fused_optimizer import fuse_optimizer as earlier

    assert earlier is later is bagua.contrib.fuse_optimizer
