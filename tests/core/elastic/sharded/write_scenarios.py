"""A replica of two shards writes checkpoints, and reads one that replicated workers wrote."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from bagua_core.elastic.checkpoint import part_file
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.part_file import CorruptPart
from tests.core.elastic.sharded import checkpoints
from tests.core.elastic.sharded.models import OPTIMIZERS, Training, WithItsOwn, same

REPLICAS = 3


def check_two_shards_write(rank: int) -> None:
    for name in OPTIMIZERS:
        training = Training(name, seed=1)
        training.train(3)
        checkpoints.write(checkpoints.shared() / f"two-{name}", training, rank, 2, REPLICAS)
        whole = checkpoints.gathered(training)
        if rank == 0:
            torch.save(whole, checkpoints.shared() / f"two-{name}.pt")
    dist.barrier()


def check_the_same_shards_read_their_own_parts_only(rank: int) -> None:
    source, target = Training(seed=1), Training(seed=2)
    source.train(3)
    opened: list[str] = []

    class Watched(LocalStorage):
        def open(self, name: str):  # type: ignore[no-untyped-def]
            opened.append(name.split("/")[-1])
            return super().open(name)

    root = checkpoints.shared() / "two-adamw"
    checkpoints.LocalStorage, kept = Watched, checkpoints.LocalStorage  # type: ignore[misc]
    try:
        checkpoints.read(root, target)
    finally:
        checkpoints.LocalStorage = kept  # type: ignore[misc]
    assert same(source.tensors(), target.tensors())
    parts = 2 * REPLICAS
    data = {name for name in opened if opened.count(name) > 1}  # each is opened once for its header
    own = {part_file.file_name(part, parts) for part in range(parts) if part % 2 == rank}
    assert own <= data
    # plain tensors (the optimizer's step counts, buffers) are in shard 0's parts
    assert (data - own) <= {part_file.file_name(part, parts) for part in range(0, parts, 2)}


def check_a_replicated_checkpoint_is_read_by_shards(rank: int) -> None:
    for name in OPTIMIZERS:
        target, again = Training(name, seed=2), Training(name, seed=1, sharded=False)
        again.train(3)
        checkpoints.read(checkpoints.shared() / f"plain-{name}", target)
        whole = checkpoints.gathered(target)
        expected = checkpoints.gathered(again)
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[n], expected[n]) for n in whole), name
        target.train(1)


def check_the_index_is_small_and_parts_are_safetensors(rank: int) -> None:
    from safetensors.torch import load_file

    folder = next((checkpoints.shared() / "two-adamw").glob("run-*-step-*"))
    path = folder / part_file.file_name(rank, 2 * REPLICAS)
    tensors = load_file(path)
    sharded = [name for name in tensors if "@" in name]
    assert sharded and all(f"@{rank}" in name for name in sharded)
    header = part_file.read_header(LocalStorage(folder.parent), f"{folder.name}/{path.name}")
    assert (header.shard, header.shards) == (rank, 2)
    assert {e.tensor for e in header.entries if "@" in e.name} == set(header.placed)
    assert len(json.dumps([p.to_json() for p in header.placed.values()])) < 60 * len(header.placed)


def check_each_shard_gets_back_what_is_its_own(rank: int) -> None:
    for algorithm in (True, False):
        source, target = WithItsOwn(rank, 1, algorithm), WithItsOwn(rank, 2, algorithm)
        source.train(3)
        root = checkpoints.shared() / f"own-{algorithm}"
        checkpoints.write(root, source, rank, 2, REPLICAS)
        dist.barrier()
        checkpoints.read(root, target, rank, 2)
        assert same(source.tensors(), target.tensors())
        assert target.own.keys() == source.own.keys()
        assert all(t.tolist() == [1.0] * (3 + rank) for t in target.own.values())


def check_shards_of_replicas_that_differ_are_never_mixed(rank: int) -> None:
    a, b, target = Training(seed=1), Training(seed=2), Training(seed=3)
    for training in (a, b):
        training.train(3)
    root = checkpoints.shared() / "differing"
    checkpoints.write(root, a, rank, 2, alone="a")
    if rank == 1:  # the other shard of this replica is killed before it writes
        checkpoints.write(root, b, rank, 2, alone="b")
    dist.barrier()
    checkpoints.read(root, target, rank, 2)
    assert same(target.tensors(), a.tensors())

    root = checkpoints.shared() / "half"
    checkpoints.write(root, (a, b)[rank], rank, 2, alone="ab"[rank])
    dist.barrier()
    with pytest.raises(CorruptPart, match="is missing"):
        checkpoints.read(root, target, rank, 2)
