"""What a deterministic job holds beside the gradients, in tensors' memory, as docs/deterministic.md says it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.communication.shards import tree_sum
from tests.core.communication.shards import test_shard_reducer
from tests.core.communication.shards.test_shard_reducer import Worker
from tests.core.communication.worlds import in_process_world, run_ranks

SHARDS = 8
FEATURES = 8192


class Wide(Worker):
    """Its gradient is one bucket, and too large to go whole."""

    def __init__(self, communicator: Any) -> None:
        super().__init__(communicator, lambda: nn.Linear(6, FEATURES, bias=False))

    def backward(self, places: range) -> None:
        self.reducer.forward_begins()
        self.model(torch.ones(3, 6)).sum().backward()

    def gradients_held(self) -> tuple[float, float]:
        """The memory of the partial sums, and that of messages, in sizes of the gradient."""
        tree, size = self.reducer._tree, FEATURES * 6 * 4
        return bytes_below(tree._sums) / size, bytes_below(tree._scratch) / size


def bytes_below(root: object) -> int:
    """The memory of all tensors that `root` holds, also in its containers."""
    found: dict[int, int] = {}
    seen, left = set[int](), [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        else:
            left += gc.get_referents(each)
    return sum(found.values())


def held(workers: int) -> tuple[float, float]:
    """The most that a worker of so many holds after three steps; memory is kept from step to step."""
    world = [Wide(c) for c in in_process_world(workers)] if workers > 1 else [Wide(None)]

    def act(worker: Wide) -> None:
        for _ in range(3):
            worker.step()

    run_ranks(world, act)
    sums, messages = zip(*(worker.gradients_held() for worker in world), strict=True)
    return max(sums), max(messages)


@pytest.mark.parametrize(
    ("workers", "sums", "messages"),
    [(1, 3, 0.0), (2, 2, 3.5), (3, 2, 5.0), (4, 1, 3.25), (8, 0, 3.125)],
)
def test_the_memory_of_one_bucket(
    workers: int, sums: int, messages: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums: one for each level of the tree that a worker owns. Messages: its own sums, what it receives of all sums,
    the sum of its chunk, and all chunks."""
    monkeypatch.setattr(test_shard_reducer, "SHARDS", SHARDS)
    monkeypatch.setattr(tree_sum, "goes_whole", lambda covers, size_bytes: False)
    found = held(workers)
    assert found[0] == sums
    assert found[1] == pytest.approx(messages, abs=0.01)
