"""The loader in rounds: local batches of this worker's lease, what was drawn, and the book as state of the job."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, WeightedRandomSampler

from bagua_core.communication.step_interface import MicroBatch, StepPlan, Used
from bagua_core.data.division import DivisionSettings, EvenDivision
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.shard_division import ShardDivision
from bagua_core.elastic.state import state_codec
from tests.core.data.fake_job import FakeEngine


class RoundEngine(FakeEngine):
    """Commits each round with what the workers of `job` used."""

    round_steps = 3

    def __init__(self, job: list[RoundEngine]) -> None:
        super().__init__()
        self.job = job
        self.closes_early = False
        job.append(self)

    def closes_round_early(self) -> bool:
        return self.closes_early


def loaders(
    count: int, samples: int = 48, **keywords: Any
) -> tuple[list[RoundEngine], list[ElasticDataLoader]]:
    job: list[RoundEngine] = []
    made = []
    for rank in range(count):
        engine = RoundEngine(job)
        engine.plan = StepPlan(1, 0, rank, count, workers=tuple("abc"[:count]))
        data = TensorDataset(torch.arange(samples))
        made.append(ElasticDataLoader(data, 4 * count, engine=engine, **keywords))
    return job, made


def run_round(loader: ElasticDataLoader, most: int | None = None) -> list[list[int]]:
    """The batches of one round; most: batches until the round is closed early."""
    engine, drawn = loader._engine, []
    assert isinstance(engine, RoundEngine) and loader.rounds is not None
    batches = loader._round(loader.rounds, engine.plan, loader._iteration)
    for batch in batches:
        drawn.append(batch[0].tolist())
        engine.closes_early = most == len(drawn)
    return drawn


def close(job: list[RoundEngine], made: list[ElasticDataLoader]) -> None:
    used = [loader.rounds.used() for loader in made if loader.rounds is not None]
    for engine, loader in zip(job, made, strict=True):
        assert loader.rounds is not None
        before = loader.position()
        loader.rounds.closed(engine.plan, used)
        loader.seek(loader.after(before))


def start(made: list[ElasticDataLoader]) -> None:
    for loader in made:
        loader._attached_engine()


def test_each_sample_of_an_epoch_is_drawn_once_by_workers_that_stop_anywhere() -> None:
    job, made = loaders(3)
    start(made)
    drawn: Counter[int] = Counter()
    stops = [(None, 1, None), (2, None, 1), (None, None, None), (1, 1, 1)]
    for number in range(40):
        if made[0].position()["epoch"] == 1:
            break
        position = made[0].position()
        rounds = [run_round(loader, stop) for loader, stop in zip(made, stops[number % 4], strict=True)]
        close(job, made)
        for rank, batches in enumerate(rounds):
            samples = [s for batch in batches for s in batch]
            drawn.update(samples)
            assert made[0].samples_of(position, job[0].plan, rank) == samples
            assert all(len(batch) >= 2 for batch in batches)
        in_all = sum(len(batch) for batches in rounds for batch in batches)
        assert {loader.sample_count(position) for loader in made} == {in_all}
    assert drawn == Counter(range(48))
    assert {str(loader.position()) for loader in made} == {"{'epoch': 1, 'batch': 0}"}


def test_a_worker_without_a_lease_takes_part_in_the_average_alone() -> None:
    job, made = loaders(2)
    job[1].plan = StepPlan(1, 0, 1, 2, frozenset({1}), ("a", "b"))
    start(made)
    assert run_round(made[1]) == []
    assert job[1].begun == [MicroBatch(0.0, True)]
    assert made[1].rounds is not None and not made[1].rounds.has_work


def test_a_worker_ends_the_round_for_all_once_its_lease_is_used_up_and_the_epoch_has_another_round() -> None:
    job, made = loaders(2, samples=48)  # 24 in a round, 3 batches of 4 for each worker
    start(made)
    first, second = (loader.rounds for loader in made)
    assert first is not None and second is not None
    run_round(made[0])
    run_round(made[1], 2)
    assert first.may_end_early and second.may_end_early
    assert (first.is_used_up, second.is_used_up) == (True, False)
    close(job, made)
    run_round(made[0])
    run_round(made[1])
    assert not first.may_end_early, "what is left now would be a round of its own"
    close(job, made)
    assert made[0].position()["epoch"] == 1


def test_a_worker_that_looked_slow_in_one_round_does_not_end_the_next_one() -> None:
    job, made = loaders(2, samples=480)
    start(made)
    first, second = (loader.rounds for loader in made)
    assert first is not None and second is not None
    for loader in made:
        run_round(loader)
    used = [Used(first.used().ranges, 1000.0), Used(second.used().ranges, 1.0)]
    for rounds, engine in zip((first, second), job, strict=True):
        rounds.closed(engine.plan, used)
    assert [len(batches) for batches in map(run_round, made)] == [5, 1]
    assert (first.is_used_up, second.is_used_up) == (True, False)


def test_the_book_travels_and_forgets_what_belongs_to_no_round_of_it() -> None:
    job, made = loaders(2)
    start(made)
    for loader in made:
        run_round(loader)
    close(job, made)
    run_round(made[1])
    manifest, tensors = state_codec.encode(made[0].rounds.state_dict())  # type: ignore[union-attr]
    mine, other = made[0].rounds, made[1].rounds
    assert mine is not None and other is not None
    assert other.has_work
    other.load_state_dict(state_codec.decode(manifest, tensors))
    assert not other.has_work
    assert other.book == mine.book
    assert other.samples_of({"epoch": 0, "batch": 0}, 1) == mine.samples_of({"epoch": 0, "batch": 0}, 1)
    with pytest.raises(ValueError, match="the leases of 48 samples do not fit an epoch of 44"):
        _, others = loaders(2, samples=44)
        start(others)
        assert others[0].rounds is not None
        others[0].rounds.load_state_dict(mine.state_dict())


def test_loader_processes_read_what_the_lease_says() -> None:
    job, made = loaders(2, num_workers=1, shuffle=False)
    start(made)
    try:
        drawn = [[run_round(loader) for loader in made]]
        close(job, made)
        drawn.append([run_round(loader) for loader in made])
        close(job, made)
    finally:
        for loader in made:
            loader.close()
    assert sorted(s for rounds in drawn for batches in rounds for b in batches for s in b) == list(range(48))


def test_drop_last_leaves_the_rest_of_an_epoch_out() -> None:
    _, made = loaders(2, samples=45, drop_last=True)
    start(made)
    assert made[0].rounds is not None
    assert made[0].rounds.book.length == 40


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"sampler": range(8)}, "a stream, a sampler or balance"),
        ({"max_local_batch_size": 2}, "max_local_batch_size=2"),
    ],
)
def test_what_does_not_go_with_rounds_is_refused(keywords: dict[str, Any], words: str) -> None:
    loader = ElasticDataLoader(TensorDataset(torch.arange(8)), 4, engine=RoundEngine([]), **keywords)
    with pytest.raises(ValueError, match=words):
        next(iter(loader))


def test_a_stream_is_refused() -> None:
    loader = ElasticDataLoader(Endless(), 4, engine=RoundEngine([]))
    with pytest.raises(ValueError, match="a stream, a sampler or balance"):
        next(iter(loader))


def test_a_loop_that_is_left_and_entered_again_does_not_begin_another_epoch() -> None:
    """The round that the break closes may be the epoch's last, for this worker alone."""
    job, made = loaders(1, samples=4)
    loader = made[0]
    for _batch in loader:
        close(job, made)  # the round closes with all places used, so the epoch is over
        break
    assert list(islice(loader, 1)) == []
    assert loader.position()["epoch"] == 1
    assert next(iter(loader)) is not None


def test_committed_samples_grow_by_what_all_workers_used_and_do_not_change_within_a_round() -> None:
    job, made = loaders(2, samples=20)
    assert made[0].committed_samples == 0  # before the first boundary, where a schedule is made
    start(made)
    seen = []
    for _ in range(4):
        before = [loader.committed_samples for loader in made]
        drawn = sum(len(batch) for loader in made for batch in run_round(loader, 1))
        assert [loader.committed_samples for loader in made] == before
        close(job, made)
        assert {loader.committed_samples for loader in made} == {before[0] + drawn}
        seen.append(drawn)
    assert sum(seen) > 20, "into the next epoch"


def test_committed_samples_of_steps_follow_from_the_position_and_are_refused_without_one() -> None:
    loader = ElasticDataLoader(TensorDataset(torch.arange(10)), 4, engine=FakeEngine())
    assert loader.committed_samples == 0
    loader.seek({"epoch": 2, "batch": 2})
    assert loader.committed_samples == 28
    dropped = ElasticDataLoader(TensorDataset(torch.arange(10)), 4, engine=FakeEngine(), drop_last=True)
    dropped.seek({"epoch": 2, "batch": 1})
    assert dropped.committed_samples == 20
    stream = ElasticDataLoader(Endless(), 4, engine=FakeEngine())
    sampled = ElasticDataLoader(
        TensorDataset(torch.arange(10)), 4, engine=FakeEngine(), sampler=WeightedRandomSampler([1.0] * 10, 30)
    )
    for loader in (stream, sampled):
        with pytest.raises(TypeError, match=r"count batches by loader\.step"):
            _ = loader.committed_samples


def test_committed_samples_of_a_deterministic_job_are_those_of_its_batches() -> None:
    even = EvenDivision(10, DivisionSettings(0, True, False, 4, None))
    assert ShardDivision(even, 4).samples_before(2, 2) == even.samples_before(2, 2) == 28


def test_a_batch_whose_loop_body_was_left_early_counts_as_used_and_not_as_fast() -> None:
    _, made = loaders(1)
    start(made)
    rounds = made[0].rounds
    assert rounds is not None
    rounds.open(StepPlan(1, 0, 0, 1, workers=("a",)))
    rounds.draw(0, 10.0)
    rounds.pause(12.0)
    rounds.draw(1, 12.0)  # and then a break
    used = rounds.used()
    assert sum(stop - first for first, stop in used.ranges) == 8
    assert used.speed == 4 / 2.0


class ClosingEngine(RoundEngine):
    """A world of one, whose boundary closes the round."""

    def boundary(self, goes_on: bool = False, confirmed: bool = False) -> StepPlan:
        if self.begun:
            assert self.source is not None and self.source.rounds is not None
            self.speeds.append(self.source.rounds.used().speed)
            self.source.rounds.closed(self.plan, [self.source.rounds.used()])
        return super().boundary(goes_on, confirmed)

    def __init__(self, job: list[RoundEngine]) -> None:
        super().__init__(job)
        self.plan = StepPlan(1, 0, 0, 1, workers=("a",))
        self.speeds: list[float] = []


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_round_that_the_script_ends_early_is_followed_by_another_lease(every: int) -> None:
    """Every round has 3 batches of 4 samples, so that every=5 ends one in its middle."""
    engine = ClosingEngine([])
    loader = ElasticDataLoader(TensorDataset(torch.arange(48)), 4, engine=engine)
    drawn: Counter[int] = Counter()
    for _epoch in loader.epochs(2):
        for number, (batch,) in enumerate(loader, 1):
            drawn.update(batch.tolist())
            if number % every == 0:
                assert loader.end_step()
    assert drawn == Counter({sample: 2 for sample in range(48)})
    assert engine.finished
    assert min(engine.speeds) > 0, "the script is done with a batch behind which it ends the round"


def test_which_batch_is_the_last_of_an_epoch_is_not_known_in_rounds() -> None:
    loader = ElasticDataLoader(TensorDataset(torch.arange(4)), 4, engine=ClosingEngine([]))
    next(iter(loader))
    with pytest.raises(TypeError, match=r"is_at_last_batch.*rounds"):
        _ = loader.is_at_last_batch
