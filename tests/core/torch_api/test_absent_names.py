"""Absent names of the original raise an error that names the replacement."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import bagua_core.torch_api as bagua
from bagua_contract.environment import WorkerEnvironmentError
from bagua_core import sync_batchnorm
from bagua_core.torch_api.absent_names import ABSENT
from bagua_core.torch_api.errors import NotOfferedError


@pytest.mark.parametrize("name", ABSENT)
def test_each_absent_name_says_what_to_use(name: str) -> None:
    where, _, last = name.rpartition(".")
    module = importlib.import_module(".".join(["bagua_core.torch_api", *filter(None, [where])]))
    with pytest.raises(NotOfferedError, match=r"is not offered by bagua_core\.torch_api: ") as told:
        getattr(module, last)
    assert ABSENT[name] in str(told.value)
    with pytest.raises(ImportError, match="is not offered"):
        exec(f"from {module.__name__} import {last}")


def test_other_names_are_no_names() -> None:
    assert not hasattr(bagua, "nonsense") and not hasattr(bagua.env, "nonsense")
    assert not hasattr(bagua.contrib, "nonsense")


@pytest.mark.parametrize(
    "name",
    [
        *("BaguaModule", "checkpoint", "env", "moe", "utils", "version", "BaguaProcessGroup"),
        *("communication.comm", "communication.from_torch_group", "algorithms.GlobalAlgorithmRegistry"),
        *("algorithms.gradient_allreduce.GradientAllReduceAlgorithmImpl", "bucket.BaguaBucket"),
        *("algorithms.bytegrad.ByteGradAlgorithmImpl", "distributed.BaguaModule", "model_parallel.moe.MoE"),
        *("contrib.utils.store.Store", "contrib.utils.redis_store.RedisStore", "utils.flatten"),
    ],
)
def test_names_that_are_there(name: str) -> None:
    where, _, last = name.rpartition(".")
    module = importlib.import_module(".".join(["bagua_core.torch_api", *filter(None, [where])]))
    assert getattr(module, last) is not None


def test_every_module_is_a_bagua_module() -> None:
    assert isinstance(nn.Linear(1, 1), bagua.BaguaModule)
    assert bagua.version == torch.__version__


def test_flat_and_back() -> None:
    tensors = [torch.ones(2, 2), torch.zeros(3)]
    parts = bagua.utils.unflatten(bagua.utils.flatten(tensors), tensors)
    assert all(torch.equal(a, b) for a, b in zip(parts, tensors, strict=True))


def test_the_registry_shows_what_init_finds() -> None:
    registry = bagua.algorithms.GlobalAlgorithmRegistry
    assert "bytegrad" in registry and "gradient_allreduce" in str(registry)
    assert registry.get("bytegrad") is bagua.algorithms.bytegrad.ByteGradAlgorithm
    with pytest.raises(KeyError, match="'nonsense' is unknown; use one of"):
        registry.get("nonsense")
    with pytest.raises(ValueError, match="'bytegrad' is registered already"):
        registry.register("bytegrad", bagua.algorithms.bytegrad.ByteGradAlgorithm)


def test_the_size_of_buckets_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bagua.env.get_default_bucket_size() == 25 << 20
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(1 << 20))
    assert bagua.env.get_default_bucket_size() == 1 << 20
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "0")
    with pytest.raises(WorkerEnvironmentError, match="BAGUA_DEFAULT_BUCKET_SIZE=0 is no number of bytes"):
        bagua.env.get_default_bucket_size()


def test_a_loaders_store_has_its_values(tmp_path: Path) -> None:
    loader = bagua.contrib.CacheLoader("embedded", "values", directory=str(tmp_path), capacity_bytes=1 << 20)
    assert loader.get("a", lambda key: 1) == 1
    store = loader.store
    store.set("b", 2)
    loader.flush()
    assert store.mget(["a", "b", "c"]) == [1, 2, None]
    assert (loader.get("b", lambda key: 3), store.num_keys(), store.status()) == (2, 2, True)
    store.clear()
    assert store.get("a") is None
    store.shutdown()


def test_batch_normalization_has_both_names() -> None:
    from bagua_core.torch_api.contrib.sync_batchnorm import SyncBatchNorm

    assert SyncBatchNorm is bagua.contrib.SyncBatchNorm
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    assert isinstance(converted, nn.Sequential)
    assert isinstance(converted[0], sync_batchnorm.SyncBatchNorm)


def test_fuse_optimizer_where_the_original_had_it() -> None:
    from bagua_core.torch_api.contrib.fuse.optimizer import fuse_optimizer as later
    from bagua_core.torch_api.contrib.fused_optimizer import fuse_optimizer as earlier

    assert earlier is later is bagua.contrib.fuse_optimizer
