"""Complexities are computed when needed, once, alike on every worker; a kept file that is out of date is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from bagua_core.data.balancing.complexities import Complexities, StaleComplexities


class Words(Dataset[str]):
    """Sample i has i % 97 letters, and some by chance if asked."""

    def __init__(self, length: int, chance: bool = False) -> None:
        self.length = length
        self.chance = chance
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        self.read.append(index)
        return "x" * (index % 97 + (random.randrange(1000) if self.chance else 0))


def lengths(count: int) -> list[float]:
    return [float(i % 97) for i in range(count)]


def test_only_what_is_needed_is_computed_and_only_once() -> None:
    words = Words(10_000)
    complexities = Complexities(words, len)
    assert words.read == []
    assert complexities.of([5, 3, 5000]) == [5.0, 3.0, float(5000 % 97)]
    assert complexities.of([3, 7]) == [3.0, 7.0]
    assert words.read == [5, 3, 5000, 7]


def test_chance_in_a_sample_follows_from_the_seed_and_leaves_the_scripts_alone() -> None:
    count = 100
    random.seed(4)
    before = random.getstate()
    complexities = Complexities(Words(count, chance=True), len, seed=3)
    complexities.complete()
    found = complexities.of(range(count))
    lazily = Complexities(Words(count, chance=True), len, seed=3)
    assert found == [lazily.of([i])[0] for i in range(count)]
    assert found != lengths(count)
    assert random.getstate() == before
    other = Complexities(Words(count, chance=True), len, seed=4)
    assert other.of(range(20)) != found[:20]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "much", None])
def test_what_is_no_complexity_is_refused_with_its_sample(value: Any) -> None:
    complexities = Complexities(Words(10), lambda word: value if len(word) == 7 else 1)
    with pytest.raises(ValueError, match="sample 7 is"):
        complexities.complete()


def test_known_complexities_are_checked() -> None:
    assert Complexities(Words(3), None, known=[1, 2.5, 0]).of([1, 0]) == [2.5, 1.0]
    with pytest.raises(ValueError, match="2 complexities for a data set of 3"):
        Complexities(Words(3), None, known=[1, 2])
    with pytest.raises(ValueError, match="sample 1 is -2"):
        Complexities(Words(3), None, known=[1, -2, 1])


# -- kept on disk


def kept(words: Words, directory: Path, function: Any = len, key: str = "lengths") -> list[float]:
    complexities = Complexities(words, function, cache_dir=directory, cache_key=key)
    complexities.complete()
    return complexities.of(range(len(words)))


def test_what_is_kept_is_not_computed_again(tmp_path: Path) -> None:
    count = 2000
    assert kept(Words(count), tmp_path) == lengths(count)
    again = Words(count)
    assert kept(again, tmp_path) == lengths(count)
    assert len(again.read) == 1, "one sample is compared with what was kept"


def test_other_keys_lengths_and_seeds_are_kept_apart(tmp_path: Path) -> None:
    kept(Words(5), tmp_path)
    assert kept(Words(5), tmp_path, lambda word: 2 * len(word), "doubled") == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert kept(Words(6), tmp_path) == lengths(6)
    Complexities(Words(5), len, seed=1, cache_dir=tmp_path, cache_key="lengths").complete()
    assert len(list(tmp_path.glob("*.npy"))) == len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda _: b"", lambda _: b"no array"])
def test_what_is_not_true_any_more_is_refused(tmp_path: Path, damage: Any) -> None:
    kept(Words(50), tmp_path)
    with pytest.raises(StaleComplexities, match="Delete that file, or give another cache_key"):
        kept(Words(50), tmp_path, lambda word: len(word) + 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StaleComplexities, match="delete it"):
        kept(Words(50), tmp_path)


def test_a_cache_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_dir needs cache_key"):
        kept(Words(5), tmp_path, key="")


def test_tensor_datasets_are_read_as_they_are() -> None:
    data = TensorDataset(torch.arange(5))
    assert Complexities(data, lambda sample: sample[0]).of([4, 1]) == [4.0, 1.0]
