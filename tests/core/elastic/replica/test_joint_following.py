"""Shards that follow generations each in its own time go on in one together, and none waits for a mate in vain.

The decisions are the real ones; words travel in order, each for as long as it likes. Every order of events is explored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bagua_contract.replica import Replica, ReplicaMember
from bagua_core.communication.communicator import Pending
from bagua_core.elastic.membership.shard_member import ShardMember
from bagua_core.elastic.replica.joint_following import JointFollowing, Word
from bagua_core.elastic.replica.own_replica import Outcome, OwnReplica
from bagua_core.elastic.replica.shard_watch import connect
from tests.core.communication.in_process import build_in_process

WITHIN_S = 20.0
HERE = "127.0.0.1"

# -- every order of events

FOLLOWS, EXCHANGES, COPIES, ARRIVES, GOES = "follows", "exchanges", "copies", "arrives", "goes"


@dataclass(frozen=True)
class Shard:
    """generation: in force here. news: the newest record that it has. entering: the one whose first exchange has its
    row, until it is in force here; 0: none."""

    generation: int = 1
    news: int = 1
    phase: str = FOLLOWS
    entering: int = 0


@dataclass(frozen=True)
class Run:
    """memory: what each shard's JointFollowing remembers. words: under way, by sender and receiver, oldest first."""

    shards: tuple[Shard, ...]
    memory: tuple[tuple[Any, ...], ...]
    words: tuple[tuple[tuple[int, int], tuple[tuple[Word, int], ...]], ...] = ()


@dataclass
class World:
    """newest: the last record. moves_are_said, entry_is_confirmed: rules that tests take away."""

    size: int
    newest: int
    moves_are_said: bool = True
    entry_is_confirmed: bool = True
    stuck: list[Run] = field(default_factory=list)
    seen: set[Run] = field(default_factory=set)

    def explore(self) -> None:
        begin = Run((Shard(),) * self.size, tuple(_memory(f) for f in self._followings(None, {})))
        left = [begin]
        while left:
            run = left.pop()
            if run in self.seen:
                continue
            self.seen.add(run)
            following = list(self.successors(run))
            if not following and not self.is_over(run):
                self.stuck.append(run)
            left.extend(following)

    def is_over(self, run: Run) -> bool:
        return all(s.phase == GOES and s.generation == self.newest for s in run.shards)

    def successors(self, run: Run) -> Iterator[Run]:
        for number, shard in enumerate(run.shards):
            if shard.news < self.newest:
                yield _with(run, number, replace(shard, news=shard.news + 1))
            yield from self.of_shard(run, number, shard)
        for (sender, receiver), words in run.words:
            told = dict(run.words)
            told[sender, receiver] = words[1:]
            hear = partial(_heard, sender=sender, word=words[0])
            yield self.acted(run, receiver, told, hear, run.shards[receiver])

    def of_shard(self, run: Run, number: int, shard: Shard) -> Iterator[Run]:
        is_behind = shard.news > shard.generation
        if shard.phase == FOLLOWS:
            if is_behind:
                begins = replace(shard, phase=EXCHANGES, entering=shard.news)
                if self.moves_are_said:
                    yield self.acted(run, number, dict(run.words), lambda f: f.moves(shard.news), begins)
                else:
                    yield _with(run, number, begins)
            else:
                waits = replace(shard, phase=ARRIVES, entering=0)
                yield self.acted(run, number, dict(run.words), lambda f: f.arrive(shard.generation), waits)
        elif shard.phase == EXCHANGES:
            if shard.news > shard.entering:  # superseded: the exchange fails here
                yield _with(run, number, replace(shard, phase=FOLLOWS, generation=shard.generation))
            if all(s.entering >= shard.entering or s.generation >= shard.entering for s in run.shards):
                if self.entry_is_confirmed:
                    arrived = replace(shard, phase=ARRIVES)
                    yield self.acted(
                        run, number, dict(run.words), lambda f: f.arrive(shard.entering), arrived
                    )
                else:
                    yield _with(run, number, Shard(shard.entering, shard.news, COPIES))
        elif shard.phase == COPIES:  # an agreement of the replica, which is not given up
            if all(s.generation == shard.generation and s.phase in (COPIES, GOES) for s in run.shards):
                yield _with(run, number, replace(shard, phase=GOES))
        elif shard.phase == ARRIVES:
            place = shard.entering or shard.generation
            found: list[bool | None] = []
            after = self.acted(run, number, dict(run.words), lambda f: found.append(f.outcome(place)), shard)
            if found[0]:
                yield _with(after, number, Shard(place, shard.news, GOES))
            elif found[0] is False or (number == 0 and shard.news > place):
                yield _with(after, number, replace(shard, phase=FOLLOWS, entering=0))
        elif is_behind and all(s.phase == GOES and s.generation == shard.generation for s in run.shards):
            # the end of the step, which needs all of them: then each follows by itself
            shards = tuple(replace(s, phase=FOLLOWS) for s in run.shards)
            yield replace(run, shards=shards)

    def acted(
        self,
        run: Run,
        number: int,
        words: dict[tuple[int, int], tuple[tuple[Word, int], ...]],
        act: Callable[[JointFollowing], object],
        shard: Shard,
    ) -> Run:
        followings = self._followings(run.memory, words)
        act(followings[number])
        memory = tuple(_memory(f) for f in followings)
        under_way = tuple(sorted((pair, said) for pair, said in words.items() if said))
        return _with(replace(run, memory=memory, words=under_way), number, shard)

    def _followings(
        self, memory: tuple[tuple[Any, ...], ...] | None, words: dict[tuple[int, int], Any]
    ) -> list[JointFollowing]:
        made = []
        for number in range(self.size):

            def send(to: int, word: Word, generation: int, sender: int = number) -> None:
                words[sender, to] = (*words.get((sender, to), ()), (word, generation))

            following = JointFollowing(number, self.size, send, threading.Condition())
            if memory is not None:
                at, following._waits_at, following._goes_at, following._moved_to = memory[number]
                following._at = dict(at)
            made.append(following)
        return made


def _heard(following: JointFollowing, sender: int, word: tuple[Word, int]) -> None:
    following.heard(sender, *word)


def _memory(f: JointFollowing) -> tuple[Any, ...]:
    return tuple(sorted(f._at.items())), f._waits_at, f._goes_at, f._moved_to


def _with(run: Run, number: int, shard: Shard) -> Run:
    return replace(run, shards=tuple(shard if n == number else s for n, s in enumerate(run.shards)))


@pytest.mark.parametrize(("size", "newest"), [(2, 3), (3, 2)])
def test_in_every_order_all_shards_come_to_the_newest_generation(size: int, newest: int) -> None:
    world = World(size, newest)
    world.explore()
    assert len(world.seen) > 100 and any(world.is_over(run) for run in world.seen)
    assert world.stuck == []
    for run in world.seen:
        going = {s.generation for s in run.shards if s.phase == GOES}
        assert len(going) <= 1, "two generations at once"


@pytest.mark.parametrize(
    "world",
    [World(2, 3, moves_are_said=False), World(2, 3, entry_is_confirmed=False)],
    ids=["moves", "entry"],
)
def test_each_rule_is_needed(world: World) -> None:
    world.explore()
    assert world.stuck, "no shard waits in vain without it"


# -- over real connections


class Member:
    """As much of a member as follows generations together with its mates."""

    def __init__(self, replica: OwnReplica) -> None:
        self.changed = threading.Condition()
        self.lost: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.replica = replica
        replica.watch_mates(self.lost.put, self.changed)
        self.session = SimpleNamespace(news=SimpleNamespace(close=False))

    def joint(self, number: int, moves: Callable[[], bool] = lambda: False) -> bool:
        return ShardMember._is_joint(self, number, moves)  # type: ignore[arg-type]

    def _look(self, waited_s: float) -> None:
        assert waited_s < WITHIN_S

    def _of_mates(self, wait: Callable[[], None]) -> None:
        wait()

    _wait_for_word = ShardMember._wait_for_word


@pytest.fixture
def two() -> Iterator[list[Member]]:
    record = Replica(
        "r0", tuple(ReplicaMember(f"w{s}", f"a{s}", f"n{s}", 0, "127.0.0.1:1") for s in range(2))
    )
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda shard: connect(store, shard, 2, HERE, HERE, WITHIN_S), range(2)))
    members = [
        Member(OwnReplica(record, c.global_rank, c, links[c.global_rank])) for c in build_in_process(2)
    ]
    yield members
    for member in members:
        member.replica.close(in_order=True)


def patient(pending: Pending) -> None:
    pending.wait()


def test_a_shard_that_waited_in_vain_agrees_with_one_that_did_not(two: list[Member]) -> None:
    """One shard hears of a generation at once, and the other waits for it in the one before."""
    first, second = two
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second.joint, 2)
        first.replica.following.moves(3)  # type: ignore[union-attr]
        assert late.result(WITHIN_S) is False
        copied = pool.submit(second.replica.agree, Outcome.DONE, patient)
        assert first.replica.agree(Outcome.DONE, patient) is Outcome.DONE
        assert copied.result(WITHIN_S) is Outcome.DONE
        goes = pool.submit(second.joint, 3)
        assert first.joint(3) and goes.result(WITHIN_S)


def test_the_first_shard_follows_news_while_the_other_is_elsewhere(two: list[Member]) -> None:
    assert two[0].joint(2, lambda: True) is False


def test_the_other_shard_goes_by_its_own_news_once_the_first_has_left_in_order(two: list[Member]) -> None:
    first, second = two
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.joint, 2)
        first.replica.close(in_order=True)
        assert waiting.result(WITHIN_S) is False
    assert second.lost.empty()


def test_a_shard_that_is_lost_ends_the_wait(two: list[Member]) -> None:
    first, second = two
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.joint, 2)
        second.replica.close(in_order=False)
        with pytest.raises(Exception, match="its connection ended"):
            waiting.result(WITHIN_S)
    assert first.lost.get(timeout=WITHIN_S) == 1
