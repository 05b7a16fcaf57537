"""The loader over streams, against the histories of a job: every item once, whatever happens."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.stream_reader import StreamError, StreamReader
from bagua_core.elastic.state.state_codec import CannotTravel
from tests.core.data.fake_job import HISTORIES, FakeEngine, Job
from tests.core.data.streams import ForgetfulPlaces, OwnGenerator, Places, PlacesWithState


def as_list(items: list[Any]) -> list[Any]:
    return items


def make_one(dataset: Any, size: int = 4, **arguments: Any) -> tuple[ElasticDataLoader, FakeEngine]:
    engine = FakeEngine()
    return ElasticDataLoader(dataset, size, collate_fn=as_list, engine=engine, **arguments), engine


@settings(max_examples=250)
@given(
    kind=st.sampled_from([Places, PlacesWithState, ForgetfulPlaces, OwnGenerator]),
    length=st.integers(1, 17),
    size=st.integers(1, 9),
    drop_last=st.booleans(),
    limit=st.none() | st.integers(1, 3),
    workers=st.integers(1, 4),
    history=HISTORIES,
)
def test_every_history_uses_every_item_once(
    kind: type[Places],
    length: int,
    size: int,
    drop_last: bool,
    limit: int | None,
    workers: int,
    history: list[Any],
) -> None:
    drop_last = drop_last and length >= size
    epochs = 3

    def make(engine: FakeEngine) -> ElasticDataLoader:
        return ElasticDataLoader(
            kind(length),
            size,
            drop_last=drop_last,
            max_local_batch_size=limit,
            collate_fn=as_list,
            engine=engine,
        )

    job = Job(make, epochs, workers)
    job.play(history)
    for epoch in range(epochs):
        items = kind(length).length_of(epoch)
        used = Counter(s for e, samples in job.committed if e == epoch for s in samples)
        assert sorted(used) == list(range(items // size * size if drop_last else items))
        assert set(used.values()) == {1}


def test_a_world_of_one_reads_the_streams_own_order() -> None:
    loader, engine = make_one(Places(5), 2)
    seen = [(epoch, [int(v) for v in data]) for epoch in loader.epochs(2) for data in loader]
    assert seen == [(0, [0, 1]), (0, [2, 3]), (0, [4]), (1, [0, 1]), (1, [2, 3]), (1, [4, 5])]
    assert engine.finished


def read(reader: StreamReader, epoch: int, batch: int) -> list[Any]:
    reader.read(epoch, batch)
    return reader.__getitems__(range(batch * 4, batch * 4 + len(reader._items)))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_joiner_with_a_state_reads_one_batch_again(drop_last: bool) -> None:
    old = StreamReader(PlacesWithState(4000), 4, drop_last, seed=7)
    batches = [read(old, 0, batch) for batch in range(101)]
    new_stream = PlacesWithState(4000)
    new = StreamReader(new_stream, 4, drop_last, seed=7)
    new.prepare()
    before = new_stream.drawn
    new.load_state_dict(old.state_dict())
    assert read(new, 0, 100) == batches[100]
    assert new_stream.drawn - before <= 8
    drawn = [item % 1 for batch in batches for item in batch]
    assert len(set(drawn)) == len(drawn), "each item has random numbers of its own"
    assert read(new, 0, 101) == read(old, 0, 101)


def test_a_joiner_without_a_state_reads_from_the_epochs_beginning() -> None:
    old = StreamReader(Places(100), 4, False, seed=7)
    batches = [read(old, 1, batch) for batch in range(11)]
    new = StreamReader(Places(100), 4, False, seed=7)
    new.prepare()
    new.load_state_dict(old.state_dict())
    assert read(new, 1, 10) == batches[10]


def test_a_state_that_does_not_continue_exactly_is_not_relied_on(caplog: pytest.LogCaptureFixture) -> None:
    old = StreamReader(ForgetfulPlaces(100), 4, False, seed=7)
    batches = [read(old, 0, batch) for batch in range(11)]
    new = StreamReader(ForgetfulPlaces(100), 4, False, seed=7)
    new.load_state_dict(old.state_dict())
    assert read(new, 0, 10) == batches[10]
    assert "load_state_dict of ForgetfulPlaces does not continue" in caplog.text
    assert new.state_dict()["mark"][2] is None


@pytest.mark.parametrize("left_at", [(0, 2), (1, 0)])
def test_an_epoch_that_follows_from_the_end_of_the_one_before_is_the_same(left_at: tuple[int, int]) -> None:
    old = StreamReader(OwnGenerator(12), 4, False, seed=7)
    for batch in range(3):
        read(old, 0, batch)
    if left_at == (1, 0):
        read(old, 1, 0)
    new = StreamReader(OwnGenerator(12), 4, False, seed=7)
    new.prepare()
    new.load_state_dict(old.state_dict())
    assert read(new, 1, 0) == read(old, 1, 0)


class Unlike(IterableDataset[float]):
    """Another order in each iteration, from a generator of its own."""

    def __init__(self) -> None:
        self._random = random.Random(id(self))

    def __iter__(self) -> Iterator[float]:
        return (self._random.random() for _ in range(100))


def test_a_stream_that_differs_each_time_is_refused() -> None:
    old = StreamReader(Unlike(), 4, False, seed=7)
    read(old, 0, 10)
    new = StreamReader(Unlike(), 4, False, seed=7)
    new.prepare()
    new.load_state_dict(old.state_dict())
    with pytest.raises(StreamError, match="Unlike has other items in batch 10 of epoch 0"):
        read(new, 0, 11)


class Counting(IterableDataset[int]):
    """Counts its epochs by itself, and has another order in each."""

    def __init__(self) -> None:
        self._iterations = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        self._iterations += 1
        for item in random.Random(self._iterations).sample(range(12), 12):
            self.drawn += 1
            yield item


def test_a_worker_that_reads_a_whole_epoch_before_its_first_says_so(caplog: pytest.LogCaptureFixture) -> None:
    old = StreamReader(Counting(), 4, False, seed=7)
    old.prepare()
    for batch in range(3):
        read(old, 0, batch)
    assert not caplog.messages
    new = StreamReader(Counting(), 4, False, seed=7)
    new.prepare()
    new.load_state_dict(old.state_dict())
    for batch in range(2):
        read(new, 1, batch)
    assert caplog.messages == [
        "Counting has neither a usable state nor set_epoch: epoch 0 is read first, before epoch 1"
    ]


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_a_joiner_at_an_epochs_end_reads_the_next_one_as_the_others_or_is_refused(epoch: int) -> None:
    old = StreamReader(Counting(), 4, False, seed=7)
    old.prepare()
    for each in range(epoch + 1):
        for batch in range(3):
            read(old, each, batch)
    new = StreamReader(Counting(), 4, False, seed=7)
    new.prepare()
    new.load_state_dict(old.state_dict())
    if epoch > 1:
        with pytest.raises(StreamError, match=f"Counting has other items in batch 2 of epoch {epoch}"):
            read(new, epoch + 1, 0)
    else:
        assert read(new, epoch + 1, 0) == read(old, epoch + 1, 0)


def test_a_joiner_at_an_epochs_end_reads_nothing_of_it_where_set_epoch_gives_the_order() -> None:
    old = StreamReader(Places(12), 4, False, seed=7)
    for batch in range(3):
        read(old, 0, batch)
    stream = Places(12)
    new = StreamReader(stream, 4, False, seed=7)
    new.prepare()
    before = stream.drawn
    new.load_state_dict(old.state_dict())
    assert read(new, 1, 0) == read(old, 1, 0)
    assert stream.drawn - before == 5


def test_another_end_of_the_epoch_is_refused() -> None:
    old = StreamReader(Places(10), 4, False, seed=7)
    read(old, 0, 2)
    for length in (8, 9, 13):
        new = StreamReader(Places(length), 4, False, seed=7)
        new.load_state_dict({**old.state_dict(), "mark": None})
        with pytest.raises(StreamError, match="another end of epoch 0 than the 10 items"):
            read(new, 0, 2)


def test_streams_that_differ_between_workers_have_other_fingerprints() -> None:
    def fingerprint(dataset: Any) -> dict[str, str]:
        loader, _ = make_one(dataset)
        next(iter(loader))
        return loader.fingerprint()

    class Second(Places):
        """Shards by rank: this is the second of two."""

        def __iter__(self) -> Iterator[float]:
            return itertools.islice(super().__iter__(), 1, None, 2)

    first = fingerprint(Places(20))
    assert first == fingerprint(Places(20))
    assert first["first_batch"] != fingerprint(Second(20))["first_batch"]


class Failing(Places):
    fails = True

    def item(self, place: int) -> float:
        if place == 6 and self.fails:
            raise OSError("the shard is away")
        return super().item(place)


class FailingWithState(PlacesWithState, Failing):
    pass


@pytest.mark.parametrize("kind", [Failing, FailingWithState])
def test_an_error_of_the_stream_leaves_the_step_unbegun_and_ends_nothing(kind: type[Failing]) -> None:
    stream = kind(9)
    loader, engine = make_one(stream)
    batches = iter(loader)
    next(batches)
    for _ in range(2):
        with pytest.raises(OSError, match="the shard is away"):
            next(iter(loader))
        assert loader.position() == {"epoch": 0, "batch": 1} and not engine.begun
    stream.fails = False
    assert [[int(v) for v in data] for data in loader] == [[4, 5, 6, 7], [8]]


def test_a_step_done_again_has_the_same_items_although_collate_takes_them_apart() -> None:
    class Records(IterableDataset[dict[str, int]]):
        def __iter__(self) -> Iterator[dict[str, int]]:
            return ({"label": place} for place in range(4))

    engine = FakeEngine()
    loader = ElasticDataLoader(
        Records(), 2, collate_fn=lambda items: [i.pop("label") for i in items], engine=engine
    )
    batches = iter(loader)
    engine.outcome = "roll back"
    assert next(batches) == [0, 1] == next(batches)
    engine.plan = StepPlan(2, 0, 0, 2, frozenset({0}))
    assert next(batches) == [0, 1], "the filler"


def test_an_endless_stream_trains_and_has_no_length() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    loader, _ = make_one(Endless())
    assert list(itertools.islice(loader, 3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    for ask in (lambda: len(loader), lambda: loader.total_steps(2)):
        with pytest.raises(TypeError, match=r"Endless has no length.*loader\.step"):
            ask()


def test_a_stream_with_a_length_has_steps() -> None:
    class Sized(Places):
        def __len__(self) -> int:
            return self.length

    assert len(make_one(Sized(9))[0]) == 3
    assert make_one(Sized(9), drop_last=True)[0].total_steps(3) == 6


@pytest.mark.parametrize(("length", "drop_last"), [(0, False), (3, True)])
def test_an_epoch_without_a_batch_is_an_error(length: int, drop_last: bool) -> None:
    loader, _ = make_one(Places(length), drop_last=drop_last)
    with pytest.raises(StreamError, match=f"gave {length} items for epoch 0.*global_batch_size=4"):
        next(iter(loader))


def test_a_state_that_cannot_travel_is_refused_before_the_first_step() -> None:
    class Own(PlacesWithState):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": object()}

    loader, _ = make_one(Own(9))
    with pytest.raises(CannotTravel, match="generator"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("dataset", "arguments", "error", "words"),
    [
        (Places(9), {"num_workers": 1}, ValueError, "num_workers=1.*read ahead"),
        (Places(9), {"shuffle": True}, ValueError, "shuffle=True.*shuffle in the data set"),
        (Places(9), {"sampler": [1, 2]}, ValueError, "sampler does not go with Places"),
        (iter([1, 2]), {}, TypeError, "iterator.*Loader"),
        (DataLoader([1, 2], batch_size=2), {}, TypeError, "DataLoader makes batches.*pass its data set"),
    ],
)
def test_what_no_stream_can_have_is_refused(
    dataset: Any, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ElasticDataLoader(dataset, 4, **arguments)


def test_reading_leaves_the_scripts_random_numbers_alone() -> None:
    loader, _ = make_one(Places(9))
    random.seed(1)
    torch.manual_seed(1)
    expected = (random.random(), torch.rand(1).item())
    random.seed(1)
    torch.manual_seed(1)
    list(loader)
    assert (random.random(), torch.rand(1).item()) == expected
