"""Data sets without a name are distinguished by type, length and indices; one that looks like another is refused."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from bagua_core.cache import cached_dataset
from bagua_core.cache.errors import CacheOptionError
from tests.core.cache.scripts_with_caches import Counted
from tests.core.cache.test_cached_dataset import cached


def test_two_unnamed_data_sets_alike_are_refused(room: Path, tmp_path: Path) -> None:
    one, other = Counted(7, tmp_path / "a"), Counted(7, tmp_path / "b")
    first = cached(one, room)
    again = cached(one, room)
    first[0]
    first.cache_loader.flush()
    again[0]
    assert one.computed() == [0]
    with pytest.raises(CacheOptionError, match="two data sets of type Counted with 7 samples and no name"):
        cached(other, room)
    cached(other, room, dataset_name="other")
    cached_dataset._made.clear()


def test_an_unnamed_data_set_that_is_gone_is_another_process_s_still(room: Path, tmp_path: Path) -> None:
    """As a validation set that was freed here, while a slower worker still reads it."""
    first = cached(Counted(7, tmp_path / "validation"), room)
    there = pickle.loads(pickle.dumps(first))  # another process's
    there[0]
    there.cache_loader.flush()
    first.close()
    del first
    gc.collect()
    with pytest.raises(CacheOptionError, match="One that is made again counts as another"):
        cached(Counted(7, tmp_path / "test"), room)
    there.close()
    cached_dataset._made.clear()


def test_unnamed_lists_are_refused_unless_they_are_one(room: Path) -> None:
    samples = ["a0", "a1", "a2"]
    first, again = cached(samples, room), cached(samples, room)
    assert first[0] == "a0" and again[0] == "a0"
    with pytest.raises(CacheOptionError, match="two data sets of type list with 3 samples and no name"):
        cached(["b0", "b1", "b2"], room)
    again.close()
    first.close()
    cached_dataset._made.clear()


@pytest.mark.parametrize("over", [lambda samples: samples, lambda samples: Subset(samples, range(3))])
def test_an_unnamed_list_is_the_same_one_when_its_first_data_set_is_gone(room: Path, over: Any) -> None:
    """As in a function that caches it again in each epoch."""
    samples = ["a0", "a1", "a2"]
    for _ in range(3):
        validation = cached(over(samples), room)
        assert validation[0] == "a0"
        validation.close()
        del validation
        gc.collect()
    cached_dataset._made.clear()


@pytest.mark.parametrize("name", ["", "held-out"])
@pytest.mark.parametrize(
    "part_of",
    [
        lambda plain, rank: Subset(plain, range(rank, 10, 2)),
        lambda plain, rank: Subset(plain, torch.arange(rank, 10, 2)),
        lambda plain, rank: Subset(Subset(plain, range(10)), np.arange(rank, 10, 2).tolist()),
        lambda plain, rank: ConcatDataset([Subset(plain, [rank]), Subset(plain, [rank + 2, rank + 4])]),
        lambda plain, rank: Subset({"first": plain[0], "second": plain[1]}, ["first", "second"][rank:][:1]),
    ],
)
def test_parts_of_one_data_set_are_told_apart_between_workers(
    part_of: Any, name: str, room: Path, tmp_path: Path
) -> None:
    plain = Counted(10, tmp_path / "log")
    parts = []
    for rank in (0, 1, 0):
        cached_dataset._made.clear()  # as in another process
        parts.append(cached(part_of(plain, rank), room, dataset_name=name))
        parts[-1][0]
        parts[-1].cache_loader.flush()
    assert [part[0][1] for part in parts] == [0, 1, 0]
    assert parts[2].stats().misses == 1, "the same part is one cache"
    cached_dataset._made.clear()


def test_unnamed_parts_of_equal_length_need_no_names_unless_their_data_sets_do(
    room: Path, tmp_path: Path
) -> None:
    one, other = Counted(7, tmp_path / "a"), Counted(7, tmp_path / "b")
    made = [cached(Subset(one, part), room) for part in (range(3), range(3, 6), [0, 1, 2])]
    assert [dataset[1][1] for dataset in made] == [1, 4, 1]
    with pytest.raises(CacheOptionError, match="two data sets of type Subset with 3 samples and no name"):
        cached(Subset(other, range(3)), room)
    cached_dataset._made.clear()


@pytest.mark.parametrize(
    "over", [lambda samples: Subset(samples, range(3)), lambda samples: ConcatDataset([samples, samples])]
)
def test_unnamed_parts_of_lists_are_refused_when_they_look_alike(room: Path, over: Any) -> None:
    first = cached(over(["a0", "a1", "a2"]), room)
    assert first[0] == "a0"
    with pytest.raises(CacheOptionError, match=r"two data sets of type .* and no name"):
        cached(over(["b0", "b1", "b2"]), room)
    first.close()
    cached_dataset._made.clear()
