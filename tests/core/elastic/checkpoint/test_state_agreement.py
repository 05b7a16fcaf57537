"""Parts of states that differ make no checkpoint."""

from __future__ import annotations

import pytest

from bagua_core.elastic.checkpoint.state_agreement import NO_CHECKPOINTS, NOT_KNOWN, difference


@pytest.mark.parametrize(
    ("digests", "shards"),
    [
        ([(1, 2)], 1),
        ([(1, 2)] * 3, 1),
        ([(1, 2), (1, 3), (1, 2), (1, 3)], 2),
        ([NOT_KNOWN, NOT_KNOWN], 1),
        ([NOT_KNOWN, NO_CHECKPOINTS], 1),
    ],
)
def test_one_state(digests: list[tuple[int, int]], shards: int) -> None:
    assert difference(digests, shards) == ""


@pytest.mark.parametrize(
    ("digests", "shards", "told"),
    [
        ([(1, 2), (1, 3), (1, 3)], 1, "the values of tensors differ between ranks [0] and [1, 2]. "),
        ([(1, 2), (4, 3)], 1, "devices of tensors differ between ranks [0] and [1]. "),
        ([(1, 2), (1, 3), (1, 2), (1, 4)], 2, "the values of tensors differ between ranks [1] and [3]. "),
        ([(1, 2), NOT_KNOWN], 1, "ranks [1] had no memory"),
        ([NO_CHECKPOINTS, (1, 2)], 1, "ranks [0] have no --checkpoint-dir"),
    ],
)
def test_ranks_that_differ_are_named(digests: list[tuple[int, int]], shards: int, told: str) -> None:
    assert told in difference(digests, shards)
