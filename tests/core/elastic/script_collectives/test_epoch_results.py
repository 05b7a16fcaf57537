"""The results that a joiner gets at the top of its loop over epochs()."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, ReduceOp
from bagua_core.communication.transports.meeting_store import MeetingServer
from bagua_core.elastic.script_collectives import kept_results
from bagua_core.elastic.script_collectives.epoch_results import EpochResults
from bagua_core.elastic.script_collectives.requests import (
    Allgather,
    Allreduce,
    Barrier,
    Broadcast,
    BroadcastBytes,
    Request,
    Result,
)
from tests.core.communication.worlds import await_true
from tests.core.elastic.worlds_of_workers import Job

ONE = torch.ones(2)
SEVEN = torch.tensor([7], dtype=torch.uint8)


class Workers:
    """One meeting store a worker, and the results that it keeps."""

    def __init__(self, count: int) -> None:
        self.abort_flag = AbortFlag()
        self.servers = [MeetingServer("127.0.0.1") for _ in range(count)]
        self.addresses = [f"127.0.0.1:{server.port}" for server in self.servers]
        self.results = [self._results(server) for server in self.servers]

    def _results(self, server: MeetingServer) -> EpochResults:
        def publish(values: dict[str, bytes]) -> None:
            server.publish({key.encode(): value for key, value in values.items()})

        member: Any = SimpleNamespace(
            session=SimpleNamespace(news=SimpleNamespace(nonce="nonce-1")),
            rendezvous=SimpleNamespace(publish=publish),
        )
        return EpochResults(member)

    def ask(self, worker: int, request: Request, *members: int) -> Result | None:
        addresses = [self.addresses[member] for member in members or (0,)]
        return self.results[worker].answer(request, addresses, self.abort_flag)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(3)
    yield made
    for server in made.servers:
        server.close()


def barrier() -> Request:
    return Barrier(torch.zeros(1), ReduceOp.SUM)


def begin_epoch(member: EpochResults, epoch: int = 2) -> None:
    member.begins(epoch)
    member.completed(Allreduce(ONE, ReduceOp.SUM), [ONE * 2])
    member.completed(Allgather(ONE), [torch.ones(2, 2)])
    member.completed(BroadcastBytes(None, root=0), [SEVEN])
    member.boundary(is_alone=False)


def test_a_joiner_gets_what_the_members_got(workers: Workers) -> None:
    begin_epoch(workers.results[0])
    workers.results[1].begins(2)
    assert workers.ask(1, Allreduce(ONE, ReduceOp.SUM))[0].tolist() == [2.0, 2.0]  # type: ignore[index]
    assert workers.ask(1, Allgather(ONE)) is None  # it has no part in it
    assert workers.ask(1, BroadcastBytes(None, root=0)) == [SEVEN]


def test_reductions_that_the_members_did_not_make_are_passed_over(workers: Workers) -> None:
    """The number of batches of an evaluation may follow from the rank."""
    begin_epoch(workers.results[0])
    workers.results[1].begins(2)
    assert workers.ask(1, Allreduce(torch.ones(3), ReduceOp.SUM)) is None
    assert workers.ask(1, BroadcastBytes(None, root=0)) == [SEVEN]
    assert workers.ask(1, barrier()) is None


@pytest.mark.parametrize("request_", [BroadcastBytes(None, root=0), Broadcast(ONE, root=0)])
def test_a_broadcast_that_the_members_did_not_make_is_a_warning(
    workers: Workers, request_: Request, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error would end a job that trains: the joiner is a member already."""
    workers.results[0].begins(2)
    workers.results[0].boundary(is_alone=False)
    workers.results[1].begins(2)
    assert workers.ask(1, request_) is None
    warned = capsys.readouterr().err
    assert (
        "in epoch 2: broadcast" in warned and "own value, since the members did not call it there" in warned
    )


def test_a_broadcast_that_is_not_kept_is_a_warning(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept_results, "MOST_KEPT_BYTES", 1 << 20)
    large = torch.ones(1 << 19)
    workers.results[0].begins(2)
    workers.results[0].completed(Broadcast(large, root=0), [large])
    workers.results[0].boundary(is_alone=False)
    workers.results[1].begins(2)
    assert workers.ask(1, Broadcast(large, root=0)) is None
    assert "own value, since results beyond 1 MiB are not kept" in capsys.readouterr().err


def test_a_joiner_that_made_fewer_calls_than_the_others_warns(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls that look alike differ by their order alone."""
    begin_epoch(workers.results[0])
    workers.results[1].begins(2)
    assert workers.ask(1, Allreduce(ONE, ReduceOp.SUM)) is not None
    workers.results[1].boundary(is_alone=True)
    assert "1 of the others' results were not asked for" in capsys.readouterr().err


def test_a_joiner_waits_for_members_that_have_not_begun_the_epoch(workers: Workers) -> None:
    begin_epoch(workers.results[0], 1)
    workers.results[1].begins(2)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(workers.ask, 1, BroadcastBytes(None, root=0))
        await_true(lambda: bool(workers.servers[0]._waiting), "it waits for the results of epoch 2")
        begin_epoch(workers.results[0])
        assert asked.result(20.0) == [SEVEN]


def test_the_end_of_the_generation_ends_the_wait(workers: Workers) -> None:
    workers.results[1].begins(2)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(workers.ask, 1, barrier())
        await_true(lambda: bool(workers.servers[0]._waiting), "it waits for the results of epoch 2")
        workers.abort_flag.set("a worker is lost")
        with pytest.raises(CollectiveAborted):
            asked.result(20.0)


def test_an_epoch_that_comes_again_has_other_results(workers: Workers) -> None:
    begin_epoch(workers.results[0])
    assert workers.servers[0]._published
    workers.results[0].ends()  # before the boundary at which a worker may join
    assert not workers.servers[0]._published
    workers.results[0].begins(2)
    workers.results[0].completed(BroadcastBytes(None, root=0), [SEVEN + 1])
    workers.results[0].boundary(is_alone=False)
    workers.results[1].begins(2)
    assert workers.ask(1, BroadcastBytes(None, root=0)) == [SEVEN + 1]


def test_a_joiner_hands_on_what_it_was_given_and_nothing_else(workers: Workers) -> None:
    begin_epoch(workers.results[0])
    for joiner in (1, 2):
        workers.results[joiner].begins(2)
    assert workers.ask(1, BroadcastBytes(None, root=0)) == [SEVEN]
    for joiner in (1, 2):
        workers.results[joiner].boundary(is_alone=True)
    workers.results[2].begins(2)
    assert workers.ask(2, Allreduce(ONE, ReduceOp.SUM), 1)[0].tolist() == [2.0, 2.0]  # type: ignore[index]


def test_a_member_without_results_is_passed_over(workers: Workers) -> None:
    """It joined in this epoch too, and did not ask for any."""
    begin_epoch(workers.results[0])
    workers.results[1].begins(2)
    workers.results[1].boundary(is_alone=True)
    workers.results[2].begins(2)
    assert workers.ask(2, BroadcastBytes(None, root=0), 1, 0) == [SEVEN]


def test_without_a_member_that_has_results_a_joiner_is_left_with_its_own(workers: Workers) -> None:
    workers.results[1].begins(2)
    workers.results[1].boundary(is_alone=True)
    workers.results[2].begins(2)
    assert workers.ask(2, barrier(), 1) is None


def test_after_a_loss_a_joiner_asks_the_members_of_the_next_generation(workers: Workers) -> None:
    """Before it, it waits for a member that does not begin the epoch any more."""
    job = Job(3)
    begin_epoch(workers.results[0])
    joiner = job.workers[2]

    def place() -> None:
        assert joiner.generation is not None and joiner.communicator is not None
        joiner.newcomers = frozenset({joiner.communicator.global_rank})
        for member in joiner.generation.members:
            member.store_address = workers.addresses[0 if member.worker_id == "w1" else 1]

    follow = joiner.follow

    def follow_and_place(*args: Any, **more: Any) -> None:
        follow(*args, **more)
        place()

    joiner.follow = follow_and_place  # type: ignore[method-assign]
    place()
    joiner.generation.members[1].store_address = workers.addresses[1]
    joiner.collectives.epoch_begins(2)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(joiner.collectives.request, BroadcastBytes(None, root=0))
        await_true(lambda: bool(workers.servers[1]._waiting), "it waits for a member of the first generation")
        assert joiner.communicator is not None
        joiner.communicator.abort("w0 is lost")  # as a member when it hears of the loss
        job.lose("w0")
        entered = pool.submit(job.workers[1].follow)
        assert asked.result(20.0) == [SEVEN]
        entered.result(20.0)
    assert joiner.breaks


def test_a_new_loop_over_epochs_has_other_results_than_one_that_was_left(workers: Workers) -> None:
    """`break` ends the generator of epochs(), which does not come to the end of the epoch."""
    begin_epoch(workers.results[0])
    workers.results[0].begins(2)
    assert not workers.servers[0]._published
