"""The transports that members build for tensors of a GPU: real meetings over sockets, NCCL by nccl_over_gloo.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from bagua_contract.records import Generation, GenerationKind
from bagua_core.communication.communicator import (
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Lane,
    Pending,
    ReduceOp,
)
from bagua_core.communication.nccl.nccl import NcclCommunicator
from bagua_core.communication.transport_choice import AUTO, GLOO
from bagua_core.communication.transports import by_device
from bagua_core.communication.transports.meeting_store import (
    GENERATIONS_KEPT,
    MeetingServer,
    MeetingStore,
    MeetingStoreError,
)
from bagua_core.communication.transports.staged import Staged
from bagua_core.elastic.membership import rendezvous
from bagua_core.elastic.membership.rendezvous import Building, Rendezvous, TransportRefused
from tests.core.communication.nccl_over_gloo import Emulation, TransportOfRank, is_of_gpu
from tests.core.communication.worlds import DEADLINE_S, await_true, run_ranks
from tests.core.elastic.records import generation

WORDS = 64  # large enough for the emulated GPU


class Meeting:
    """Workers w0, w1, ... in threads, each with its own rendezvous."""

    def __init__(
        self,
        transports: Sequence[TransportOfRank],
        setting: str = AUTO,
        lanes: frozenset[Lane] = frozenset(),
        agents: Sequence[str] = (),
        replica_size: int = 1,
    ) -> None:
        self.changed = threading.Condition()
        self.failures: list[tuple[int, int, Exception]] = []
        self.replica_size = replica_size
        self.agents = list(agents) or [f"agent-{r}" for r in range(len(transports))]
        self.members = [
            Rendezvous(f"w{r}", "127.0.0.1", self.changed, self._failure_of(r), setting, [transport])
            for r, transport in enumerate(transports)
        ]
        for member, transport in zip(self.members, transports, strict=True):
            member.lanes = lanes
            member.gpus = transport.gpus
        self.made: list[Building] = []

    def _failure_of(self, rank: int) -> Callable[[int, Exception], None]:
        return lambda number, error: self.failures.append((rank, number, error))

    def record(self, number: int, ranks: Sequence[int] | None = None) -> Generation:
        chosen = range(len(self.members)) if ranks is None else ranks
        plain = generation(number, *(f"w{r}" for r in chosen))
        placed = tuple(
            replace(
                m,
                agent_id=self.agents[r],
                store_address=self.members[r].address,
                replica_rank=m.global_rank // self.replica_size,
                shard_rank=m.global_rank % self.replica_size,
            )
            for r, m in zip(chosen, plain.members, strict=True)
        )
        return replace(plain, members=placed)

    def start(
        self, number: int, ranks: Sequence[int] | None = None, *, drained: bool = True
    ) -> list[Building]:
        """drained: all are at the boundary at which the generation begins."""
        record = self.record(number, ranks)
        begun = [self.members[int(m.worker_id[1:])].start(record) for m in record.members]
        self.made += begun
        for building in begun if drained else ():
            building.drained()
        return begun

    def start_group(self, number: int, members: tuple[int, ...], name: str) -> list[Building]:
        record = self.record(number)
        begun = [self.members[r].start(record, members, f"outside/{name}") for r in members]
        self.made += begun
        return begun

    def await_done(self, buildings: Sequence[Building]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(b.done for b in buildings), DEADLINE_S)

    def built(self, number: int, ranks: Sequence[int] | None = None) -> list[Communicator]:
        buildings = self.start(number, ranks)
        self.await_done(buildings)
        return communicators_of(buildings)

    def close(self) -> None:
        for building in self.made:
            building.abandon("the test is over")
        self.await_done(self.made)
        for member in self.members:
            member._server.close()


def communicators_of(buildings: Sequence[Building]) -> list[Communicator]:
    assert [b.error for b in buildings] == [None] * len(buildings)
    found = [b.communicator for b in buildings]
    assert all(c is not None for c in found)
    return [c for c in found if c is not None]


def of_gpu(communicator: Communicator) -> Communicator:
    assert isinstance(communicator, by_device.ByDevice)
    return communicator._of_gpu


def assert_reduces(world: Sequence[Communicator]) -> None:
    """Both kinds of tensors, at once and in either order."""

    def act(c: Communicator) -> list[float]:
        large, small = torch.full((WORDS,), c.global_rank + 1.0), torch.full((2,), c.global_rank + 1.0)
        assert is_of_gpu(large) and not is_of_gpu(small)
        begun = [c.allreduce(large), c.allreduce(small)]
        for pending in begun:
            pending.wait()
        whole = torch.arange(WORDS, dtype=torch.float32) * c.global_rank
        c.broadcast(whole, 0).wait()
        assert not whole.any()
        return [float(large.max()), float(small.max()), float(large.min())]

    total = sum(range(1, len(world) + 1))
    assert run_ranks(world, act) == [[total] * 3] * len(world)


Make = Callable[..., Meeting]


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    made = Emulation()
    made.install(monkeypatch.setattr)
    yield made
    made.close()


@pytest.fixture
def meeting(emulation: Emulation) -> Iterator[Make]:
    made: list[Meeting] = []

    def make(*arguments: object, **keywords: object) -> Meeting:
        made.append(Meeting(*arguments, **keywords))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def able(count: int) -> list[TransportOfRank]:
    return [TransportOfRank(f"host {r}") for r in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_members_that_all_can_use_nccl_do(
    meeting: Make, emulation: Emulation, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    one = meeting(able(count))
    world = one.built(1)
    assert all(isinstance(of_gpu(c), NcclCommunicator) for c in world)
    assert_reduces(world)
    assert emulation.calls.count("allReduce") == count, "the large tensors, and no other"
    said = capfd.readouterr().err
    assert said.count("bagua: tensors of GPUs travel by NCCL 2.27.7") == 1, "once, not once a member"
    assert_reduces(one.built(2))
    assert "travel by" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (TransportOfRank(None), "global ranks [1] had nothing on a GPU"),
        (
            TransportOfRank("host 1", "no CuPy; install bagua-elastic[cuda12]"),
            "[1]: no CuPy; install bagua-elastic[cuda12]",
        ),
        (TransportOfRank("host 1", version=23004), "NCCL 2.27.7 and 2.30.4"),
        (TransportOfRank("host 0"), "global ranks [0, 1] use one GPU (host 0)"),
    ],
)
def test_one_member_without_it_takes_all_to_gloo(
    meeting: Make, emulation: Emulation, odd: TransportOfRank, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    one = meeting([TransportOfRank("host 0"), odd, TransportOfRank("host 2")])
    world = one.built(1)
    assert all(isinstance(of_gpu(c), Staged) for c in world)
    assert_reduces(world)
    assert not emulation.joined, "no rank has begun to join NCCL"
    said = capfd.readouterr().err
    assert said.count("bagua: tensors of GPUs travel by Gloo") == 1 and words in said


def test_without_any_gpu_there_is_gloo_and_not_a_word(
    meeting: Make, emulation: Emulation, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_reduces(meeting([TransportOfRank(None), TransportOfRank(None)]).built(1))
    assert not emulation.joined and "bagua" not in capfd.readouterr().err


def test_insisting_on_nccl_in_vain_is_the_scripts_own_failure(meeting: Make) -> None:
    one = meeting([TransportOfRank("host 0"), TransportOfRank(None)], "nccl")
    buildings = one.start(1)
    one.await_done(buildings)
    for building in buildings:
        assert isinstance(building.error, TransportRefused) and building.communicator is None
        assert "BAGUA_TRANSPORT=nccl (global ranks [0, 1]) can't be: global ranks [1]" in str(building.error)
    assert not one.failures, "making the generation anew would not help, so the leader is not asked to"


def test_asking_for_gloo_is_enough(meeting: Make, emulation: Emulation) -> None:
    assert_reduces(meeting(able(2), GLOO).built(1))
    assert not emulation.joined


def test_lanes_and_groups_are_of_the_transport_of_their_generation(meeting: Make) -> None:
    one = meeting(able(4), lanes=frozenset(Lane), agents=["a", "a", "b", "b"])
    world = one.built(1)
    assert [sorted(lane.value for lane in c.lanes) for c in world] == [
        ["background", "leaders", "node", "statistics"],
        ["background", "node", "statistics"],
    ] * 2
    for lane, ranks in ((Lane.NODE, (2, 3)), (Lane.LEADERS, (0, 2)), (Lane.BACKGROUND, (0, 1, 2, 3))):
        in_lane = [world[r].lanes[lane] for r in ranks]
        assert all(isinstance(of_gpu(c), NcclCommunicator) for c in in_lane)
        assert_reduces(in_lane)
    buildings = one.start_group(1, (1, 3), "group")
    one.await_done(buildings)
    group = communicators_of(buildings)
    assert all(isinstance(of_gpu(c), NcclCommunicator) for c in group)
    assert_reduces(group)


@pytest.mark.parametrize(
    ("agents", "has_one"), [(["a"] * 4, True), (["a", "b", "a", "b"], False), (["a", "a", "b", "b"], False)]
)
def test_the_lane_of_a_shard_knows_whether_the_job_has_one_node(
    meeting: Make, agents: list[str], has_one: bool
) -> None:
    one = meeting(able(4), agents=agents, replica_size=2)
    shards = [c.lanes[Lane.SHARD] for c in one.built(1)]
    assert [lane.job_has_one_node for lane in shards] == [has_one] * 4


def test_workers_that_are_alone_on_their_nodes_need_no_lanes_of_nodes(meeting: Make) -> None:
    one = meeting(able(2), lanes=frozenset(Lane))
    assert [set(c.lanes) for c in one.built(1)] == [{Lane.BACKGROUND, Lane.STATISTICS}] * 2


def test_many_lanes_of_one_generation_do_not_push_each_other_out_of_the_store() -> None:
    server = MeetingServer("127.0.0.1")
    store = MeetingStore("127.0.0.1", server.port, 2.0)
    for node in range(2 * GENERATIONS_KEPT):
        store.set(f"nonce/1/all/lanes/node/{node}/nccl/collectives/id", b"x")
    store.set("nonce/1/outside/group-x/0", b"x")
    assert store.get("nonce/1/all/lanes/node/0/nccl/collectives/id") == b"x"
    for number in range(2, 2 + GENERATIONS_KEPT):
        store.set(f"nonce/{number}/all/0", b"x")
    with pytest.raises(MeetingStoreError):
        store.get("nonce/1/outside/group-x/0")
    store.close()
    server.close()


def test_an_abort_releases_waits_of_both_and_of_lanes(meeting: Make) -> None:
    one = meeting(able(2), lanes=frozenset({Lane.BACKGROUND}))
    world = one.built(1)

    def start(c: Communicator) -> list[Pending]:
        return [
            c.allreduce(torch.ones(WORDS)),
            c.allreduce(torch.ones(2)),
            c.lanes[Lane.BACKGROUND].allreduce(torch.ones(WORDS), ReduceOp.MAX),
        ]

    waits = start(world[0])
    world[0].abort("lost")
    for pending in waits:
        with pytest.raises(CollectiveAborted, match="lost"):
            pending.wait()
    for pending in start(world[1]):  # what Gloo still has under way ends
        pending.wait()


def test_aborting_a_lane_leaves_the_generation_and_its_other_lanes(meeting: Make) -> None:
    one = meeting(able(2), lanes=frozenset({Lane.BACKGROUND, Lane.STATISTICS}))
    world = one.built(1)
    tensors = [torch.ones(2), torch.ones(WORDS)]
    waits = [world[0].lanes[Lane.BACKGROUND].allreduce(tensor) for tensor in tensors]  # rank 1 never comes
    world[0].lanes[Lane.BACKGROUND].abort("training is over")
    for pending in waits:
        with pytest.raises(CollectiveAborted, match="training is over"):
            pending.wait()
    assert not any(c.abort_flag.is_set() for c in world)
    assert_reduces(world)
    assert_reduces([c.lanes[Lane.STATISTICS] for c in world])
    world[0].abort("lost")
    assert world[0].lanes[Lane.STATISTICS].abort_flag.reason == "lost"


# -- a planned generation


def await_connected(one: Meeting, buildings: Sequence[Building]) -> None:
    with one.changed:
        assert one.changed.wait_for(lambda: all(b.is_connected for b in buildings), DEADLINE_S)


def test_no_member_joins_nccl_before_all_are_drained(meeting: Make, emulation: Emulation) -> None:
    """Nor does any begin to: the store's time-out for the meeting would run while others still compute."""
    begun: list[int] = []
    transports = [TransportOfRank(f"host {r}", before=lambda: begun.append(1)) for r in range(3)]
    one = meeting(transports, lanes=frozenset({Lane.BACKGROUND}))
    buildings = one.start(1, drained=False)
    await_connected(one, buildings)
    for building in buildings[:2]:
        building.drained()
    with one.changed:
        assert not one.changed.wait_for(lambda: bool(emulation.joined), 0.3), "the third still runs kernels"
    assert not begun
    buildings[2].drained()
    one.await_done(buildings)
    world = communicators_of(buildings)
    assert_reduces(world)
    assert_reduces([c.lanes[Lane.BACKGROUND] for c in world])


def test_without_nccl_nothing_waits_for_that(meeting: Make) -> None:
    one = meeting([TransportOfRank(None), TransportOfRank(None)])
    buildings = one.start(1, drained=False)
    one.await_done(buildings)
    assert_reduces(communicators_of(buildings))


def test_a_failover_joins_without_it_for_its_kernels_are_aborted(
    meeting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = meeting(able(2))
    record = one.record(1)
    monkeypatch.setattr(one, "record", lambda *_: replace(record, kind=GenerationKind.FAILOVER))
    buildings = one.start(1, drained=False)
    one.await_done(buildings)
    assert_reduces(communicators_of(buildings))


def test_a_generation_that_is_superseded_before_its_boundary_ends(
    meeting: Make, emulation: Emulation
) -> None:
    one = meeting(able(2))
    buildings = one.start(1, drained=False)
    await_connected(one, buildings)
    buildings[0].drained()  # it waits for the other
    for building in buildings:
        building.abandon("generation 2 supersedes it")
    one.await_done(buildings)
    assert all(isinstance(b.error, CollectiveAborted) for b in buildings)
    assert not emulation.joined and not one.failures
    assert_reduces(one.built(2))


# -- builds that end otherwise


class Gate:
    """A rank stays in its build until the test releases it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)


def test_a_new_generation_aborts_a_build_that_waits_for_a_member_that_died(
    meeting: Make, emulation: Emulation
) -> None:
    """It died after it had said that it can: the others have begun to join, and it never will."""
    gate = Gate()
    transports = [*able(2), TransportOfRank("host 2", before=gate)]
    one = meeting(transports)
    buildings = one.start(1)
    assert gate.reached.wait(DEADLINE_S)
    assert not emulation.joined, "no rank joins before all are there"
    assert not any(b.done for b in buildings)
    for building in buildings[:2]:
        building.abandon("generation 2 supersedes it")
    one.await_done(buildings[:2])
    for building in buildings[:2]:
        assert isinstance(building.error, CollectiveFailed) and building.communicator is None
    assert not one.failures, "it was given up on purpose"
    assert_reduces(one.built(2, [0, 1]))
    buildings[2].abandon("it is dead")
    gate.opened.set()


def test_a_new_generation_aborts_a_joining_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch, meeting: Make
) -> None:
    gate = Gate()
    emulation = Emulation(joining=lambda rank: gate() if rank == 2 and not gate.opened.is_set() else None)
    emulation.install(monkeypatch.setattr)
    one = meeting(able(3))
    buildings = one.start(1)
    assert gate.reached.wait(DEADLINE_S)
    await_true(lambda: len(emulation.joined) == 3, "all have begun to join")
    assert not any(b.done for b in buildings)
    for building in buildings:
        building.abandon("generation 2 supersedes it")
    one.await_done(buildings)
    assert all(isinstance(b.error, CollectiveAborted) for b in buildings)
    assert [j.ended for j in emulation.joined.values()] == ["aborted"] * 3, "NCCL was told"
    assert not one.failures
    gate.opened.set()
    assert_reduces(one.built(2))
    emulation.close()


def test_a_member_that_does_not_join_fails_the_generation_in_time(
    monkeypatch: pytest.MonkeyPatch, meeting: Make
) -> None:
    gate = Gate()
    emulation = Emulation(joining=lambda rank: gate() if rank == 2 else None)
    emulation.install(monkeypatch.setattr)
    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT_S", 1.0)
    one = meeting(able(3))
    buildings = one.start(1)
    one.await_done(buildings)
    for building in buildings:
        assert isinstance(building.error, CollectiveFailed) and building.communicator is None
        assert "not all of 3 ranks came together" in str(building.error)
        assert "BAGUA_TRANSPORT=gloo" in str(building.error), "what to do about it"
    assert sorted(rank for rank, number, _ in one.failures if number == 1) == [0, 1, 2], (
        "the leader receives it"
    )
    gate.opened.set()
    emulation.close()


def test_a_build_that_fails_at_a_lane_leaves_nothing_open(meeting: Make, emulation: Emulation) -> None:
    calls: list[None] = []

    def fails_at_the_second() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise CollectiveFailed("the driver says no")

    one = meeting(
        [TransportOfRank("host 0"), TransportOfRank("host 1", before=fails_at_the_second)],
        lanes=frozenset({Lane.BACKGROUND}),
    )
    buildings = one.start(1)
    one.await_done(buildings[1:])
    assert "the driver says no" in str(buildings[1].error)
    assert [(rank, number) for rank, number, _ in one.failures] == [(1, 1)]
    assert not buildings[0].done, "it waits for the other's lane"
    buildings[0].abandon("generation 2 supersedes it")
    one.await_done(buildings)
    await_true(
        lambda: [j.ended for j in emulation.joined.values()] == ["aborted"] * 4, "the main ones of both"
    )


def test_a_build_that_was_abandoned_when_it_was_done_leaves_nothing_open(
    meeting: Make, emulation: Emulation
) -> None:
    one = meeting(able(2))
    buildings = one.start(1)
    one.await_done(buildings)
    for building in buildings:
        building.abandon("superseded")
    await_true(
        lambda: [j.ended for j in emulation.joined.values()] == ["aborted"] * 4, "both lines of both ranks"
    )
