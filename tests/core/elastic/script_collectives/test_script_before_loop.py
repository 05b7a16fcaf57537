"""The answers that a later worker gets before its loop, and the calls that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_contract.records import Generation
from bagua_core.communication.communicator import ReduceOp
from bagua_core.communication.transports.meeting_store import GENERATIONS_KEPT, MeetingServer, MeetingStore
from bagua_core.elastic.script_collectives import kept_results
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop, LateWorkerError
from bagua_core.elastic.script_collectives.requests import (
    Allgather,
    AllgatherRows,
    Allreduce,
    Barrier,
    Broadcast,
    BroadcastBytes,
    Request,
)
from bagua_core.elastic.waiting.operations import MismatchedCollective
from tests.core.communication.worlds import await_true
from tests.core.elastic.records import generation

ONE = torch.ones(2)


class Members:
    """Two workers' meeting stores, and what they hand on."""

    def __init__(self) -> None:
        self.servers = [MeetingServer("127.0.0.1") for _ in range(2)]

    def address(self, index: int) -> str:
        return f"127.0.0.1:{self.servers[index].port}"

    def record(self) -> Generation:
        return generation(2, "w0", "w1", store_address=self.address(0))

    def first(self, index: int = 0) -> BeforeLoop:
        member: Any = SimpleNamespace(
            session=SimpleNamespace(news=SimpleNamespace(nonce=self.record().nonce)),
            rendezvous=SimpleNamespace(publish=lambda values: self.publish(index, values)),
        )
        return BeforeLoop(member)

    def publish(self, index: int, values: dict[str, bytes]) -> None:
        self.servers[index].publish({key.encode(): value for key, value in values.items()})

    def later(self) -> BeforeLoop:
        """A worker that comes while the members train."""
        member: Any = SimpleNamespace(
            replica=None,
            gather=lambda trains: not trains(self.record()),
            session=SimpleNamespace(news=SimpleNamespace(nonce=self.record().nonce)),
            rendezvous=SimpleNamespace(publish=lambda values: self.publish(1, values)),
        )
        made = BeforeLoop(member)
        made.join()
        assert made.is_late
        return made


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    for server in made.servers:
        server.close()


def barrier() -> Request:
    return Barrier(torch.zeros(1), ReduceOp.SUM)


def test_it_is_answered_in_order(members: Members) -> None:
    first = members.first()
    first.completed(barrier(), None, [torch.zeros(1)])
    first.completed(Allreduce(ONE, ReduceOp.SUM), None, [ONE * 2])
    first.completed(BroadcastBytes(None, root=0), 0, [torch.tensor([7], dtype=torch.uint8)])
    first.boundary()
    later = members.later()
    assert later.is_late
    assert later.place() == (2, 3)
    assert later.answer(barrier())[0].tolist() == [0.0]
    assert later.answer(Allreduce(ONE, ReduceOp.SUM))[0].tolist() == [2.0, 2.0]
    assert later.answer(BroadcastBytes(None, root=0))[0].tolist() == [7]
    with pytest.raises(MismatchedCollective, match="asked for nothing more"):
        later.answer(barrier())
    later.boundary()
    assert not later.is_late and later.place() is None


def test_another_collective_than_theirs_is_named(members: Members) -> None:
    first = members.first()
    first.completed(barrier(), None, [torch.zeros(1)])
    first.boundary()
    with pytest.raises(MismatchedCollective, match=r"asks for allreduce.*asked for barrier there"):
        members.later().answer(Allreduce(ONE, ReduceOp.SUM))


@pytest.mark.parametrize("kind", [Allgather, AllgatherRows])
def test_what_has_a_part_of_each_worker_is_refused_with_a_way_to_go(
    members: Members, kind: type[Allgather]
) -> None:
    first = members.first()
    first.completed(kind(ONE), None, [torch.ones(2, 2)])
    first.boundary()
    with pytest.raises(LateWorkerError, match=r"own part in it.*broadcast_object"):
        members.later().answer(kind(ONE))


def test_what_each_shard_has_of_its_own_is_refused(members: Members) -> None:
    """The members that answer may have another shard, whose tensors have another shape."""
    first = members.first()
    first.completed(Allreduce(ONE, ReduceOp.SUM, across_replicas=True), None, [ONE * 2])
    first.boundary()
    with pytest.raises(LateWorkerError, match=r"allreduce across replicas before the loop.*own part in it"):
        members.later().answer(Allreduce(torch.ones(3), ReduceOp.SUM, across_replicas=True))


def test_more_than_is_kept(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "MOST_KEPT_BYTES", 3 << 20)
    first = members.first()
    large = torch.arange(1 << 19, dtype=torch.float32)  # 2 MiB: several parts
    for _ in range(2):
        first.completed(Broadcast(large, root=0), 0, [large])
    first.completed(barrier(), None, [torch.zeros(1)])
    first.boundary()
    later = members.later()
    assert torch.equal(later.answer(Broadcast(large, root=0))[0], large)
    with pytest.raises(LateWorkerError, match="3 MiB are not kept"):
        later.answer(Broadcast(large, root=0))
    later.answer(barrier())


def test_it_stays_however_many_generations_follow(members: Members) -> None:
    first = members.first()
    first.completed(barrier(), None, [torch.zeros(1)])
    first.boundary()
    host, port = members.address(0).split(":")
    store = MeetingStore(host, int(port), 5.0)
    for number in range(3 * GENERATIONS_KEPT):
        store.set(f"nonce-1/{number}/key", "value")
    store.get(f"nonce-1/{3 * GENERATIONS_KEPT - 1}/key")
    store.close()
    assert members.later().answer(barrier())


@pytest.mark.parametrize("data", [b"", b"not what torch.save writes", b"\x80\x04."])
def test_a_member_that_answers_with_something_else_is_passed_over(members: Members, data: bytes) -> None:
    host, port = members.address(0).split(":")
    store = MeetingStore(host, int(port), 5.0)
    record = members.record()
    store.set(f"{record.nonce}/before-loop/part-0", data)
    store.set(f"{record.nonce}/before-loop/parts", "1")
    store.get(f"{record.nonce}/before-loop/parts")
    store.close()
    told: list[bool] = []
    member: Any = SimpleNamespace(replica=None, gather=lambda trains: told.append(trains(record)) or True)
    made = BeforeLoop(member)
    made.join()
    assert told == [False]
    assert not made.is_late


def test_strangers_that_fill_the_store_push_out_nothing_that_is_published(members: Members) -> None:
    first = members.first()
    first.completed(barrier(), None, [torch.zeros(1)])
    first.boundary()
    host, port = members.address(0).split(":")
    store = MeetingStore(host, int(port), 5.0)
    for number in range(3 * GENERATIONS_KEPT):
        store.set(f"x{number}/before-loop/parts", "9")
    store.set(f"{members.record().nonce}/before-loop/parts", "9")
    store.set("nonce-1/1/key", "value")
    assert store.get("nonce-1/1/key") == b"value", "it still serves"
    store.close()
    assert members.later().answer(barrier())


def test_one_that_asks_too_early_is_answered_once_it_is_published(members: Members) -> None:
    host, port = members.address(0).split(":")
    store = MeetingStore(host, int(port), 20.0)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(store.get, f"{members.record().nonce}/before-loop/parts")
        await_true(lambda: bool(members.servers[0]._waiting), "it waits for the results")
        members.first().boundary()
        assert asked.result(20.0) == b"1"
    store.close()


def test_the_number_of_answers_is_bounded(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "MOST_ANSWERS", 2)
    first = members.first()
    for _ in range(5):
        first.completed(barrier(), None, [torch.zeros(1)])
    first.boundary()
    later = members.later()
    later.answer(barrier())
    later.answer(barrier())
    with pytest.raises(LateWorkerError, match="no more than 2 results"):
        later.answer(barrier())
