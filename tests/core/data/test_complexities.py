"""Complexities are computed when needed, once, alike by whoever does it, and kept only as long as they are true."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from bagua_core.data.balancing import complexity_blocks
from bagua_core.data.balancing.complexities import Complexities
from bagua_core.data.balancing.complexity_blocks import BLOCK, StaleComplexities
from bagua_core.data.balancing.function_identity import UnknownFunction, function_identity


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


@pytest.mark.parametrize(("workers", "threads"), [(0, False), (2, False), (2, True), (None, False)])
def test_whoever_computes_them_they_are_the_same(workers: int | None, threads: bool) -> None:
    count = 2 * BLOCK + 17
    words = Words(count)
    complexities = Complexities(words, len, workers=workers, threads=threads)
    complexities.complete()
    assert complexities.of(range(count)) == lengths(count)
    here = workers != 2 or threads
    assert len(words.read) == (count if here else 0), "in processes this one reads nothing"


def test_chance_in_a_sample_follows_from_the_seed_and_leaves_the_scripts_alone() -> None:
    count = BLOCK + 5
    random.seed(4)
    before = random.getstate()
    found = []
    for workers in (0, 2):
        complexities = Complexities(Words(count, chance=True), len, seed=3, workers=workers)
        complexities.complete()
        found.append(complexities.of(range(count)))
    lazily = Complexities(Words(count, chance=True), len, seed=3)
    assert found[0] == found[1] == [lazily.of([i])[0] for i in range(count)]
    assert found[0] != lengths(count)
    assert random.getstate() == before
    other = Complexities(Words(count, chance=True), len, seed=4)
    assert other.of(range(20)) != found[0][:20]


def test_processes_are_started_only_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    words = Words(3 * BLOCK)
    Complexities(words, len).complete()
    assert len(words.read) == 3 * BLOCK
    monkeypatch.setattr(complexity_blocks, "_WORTH_PROCESSES_S", 0.0)
    words = Words(3 * BLOCK)
    complexities = Complexities(words, len)
    complexities.complete()
    assert len(words.read) == BLOCK, "the first block showed that it takes long"
    assert complexities.of(range(3 * BLOCK)) == lengths(3 * BLOCK)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "much", None])
def test_what_is_no_complexity_is_refused_with_its_sample(value: Any, workers: int) -> None:
    complexities = Complexities(Words(10), lambda word: value if len(word) == 7 else 1, workers=workers)
    with pytest.raises(ValueError, match="sample 7 is"):
        complexities.complete()


def test_known_complexities_are_checked() -> None:
    assert Complexities(Words(3), None, known=[1, 2.5, 0]).of([1, 0]) == [2.5, 1.0]
    with pytest.raises(ValueError, match="2 complexities for a data set of 3"):
        Complexities(Words(3), None, known=[1, 2])
    with pytest.raises(ValueError, match="sample 1 is -2"):
        Complexities(Words(3), None, known=[1, -2, 1])


# -- kept on disk


def kept(words: Words, directory: Path, function: Any = len, key: str = "") -> list[float]:
    complexities = Complexities(words, function, workers=0, cache_dir=directory, cache_key=key)
    complexities.complete()
    return complexities.of(range(len(words)))


def test_what_is_kept_is_not_computed_again(tmp_path: Path) -> None:
    count = 2 * BLOCK + 1
    assert kept(Words(count), tmp_path) == lengths(count)
    again = Words(count)
    assert kept(again, tmp_path) == lengths(count)
    assert len(again.read) == 3, "one of each block, to see whether it is still true"


def _keep_and_tell(length: int, directory: Path, reads: Any) -> None:
    words = Words(length)
    found = kept(words, directory)
    reads.put((found == lengths(length), len(words.read)))


def test_workers_of_a_node_share_the_work(tmp_path: Path) -> None:
    count, context = 8 * BLOCK, multiprocessing.get_context("fork")
    reads = context.Queue()
    processes = [context.Process(target=_keep_and_tell, args=(count, tmp_path, reads)) for _ in range(2)]
    for process in processes:
        process.start()
    told = [reads.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert all(right for right, _ in told)
    assert sum(read for _, read in told) < 2 * count, "what one has kept the other need not compute"
    assert not list(tmp_path.glob("*/*.part"))


def test_other_functions_data_and_keys_are_kept_apart(tmp_path: Path) -> None:
    kept(Words(5), tmp_path)
    assert kept(Words(5), tmp_path, lambda word: 2 * len(word)) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert kept(Words(5), tmp_path, lambda word: 3 * len(word)) == [0.0, 3.0, 6.0, 9.0, 12.0]
    for words, key in ((Words(6), ""), (Words(5), "version 2")):
        kept(words, tmp_path, key=key)
        assert len(words.read) == len(words)


def test_what_is_not_true_any_more_is_refused(tmp_path: Path) -> None:
    kept(Words(50), tmp_path)

    class Words2(Words):
        def __getitem__(self, index: int) -> str:
            return super().__getitem__(index) + "y"

    Words2.__qualname__ = Words.__qualname__  # the same class, edited
    with pytest.raises(StaleComplexities, match=r"Delete that directory, or give another cache_key"):
        kept(Words2(50), tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:-1] + b"\xff", lambda _: b""])
def test_a_damaged_block_is_computed_again(tmp_path: Path, damage: Any) -> None:
    kept(Words(50), tmp_path)
    (path,) = tmp_path.glob("*/*.complexities")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kept(Words(50), tmp_path) == lengths(50)
    assert path.read_bytes() == whole


class Tokenizer:
    def __call__(self, word: str) -> int:
        return len(word)


def test_what_hides_its_doing_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give cache_key"):
        kept(Words(5), tmp_path, Tokenizer())
    assert kept(Words(5), tmp_path, Tokenizer(), "tokenizer 1") == lengths(5)
    Complexities(Words(5), Tokenizer())  # nothing is kept, so nothing can be mistaken


def times(factor: int) -> Any:
    return lambda word: factor * len(word)


def test_functions_are_told_apart_by_what_they_do() -> None:
    def scaled(word: str, factor: int = 2) -> int:
        return factor * len(word)

    different = [
        len,
        times(2),
        times(3),
        scaled,
        functools.partial(scaled, factor=3),
        lambda word: word.count("x"),
    ]
    assert len({function_identity(function) for function in different}) == len(different)
    assert function_identity(times(2)) == function_identity(times(2))
    with pytest.raises(UnknownFunction):
        function_identity("word".count)


def test_tensor_datasets_are_read_as_they_are() -> None:
    data = TensorDataset(torch.arange(5))
    assert Complexities(data, lambda sample: sample[0]).of([4, 1]) == [4.0, 1.0]
