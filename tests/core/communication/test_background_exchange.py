"""Exchanges beside the steps run one after the other on a lane, and each ends once, whatever it raises."""

from __future__ import annotations

import threading

import pytest
import torch

from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Communicator
from bagua_core.communication.weights.background_exchange import BackgroundExchange
from tests.core.communication.worlds import DEADLINE_S, in_process_world, run_ranks


def sums(flat: torch.Tensor) -> object:
    def act(lane: Communicator) -> None:
        lane.allreduce(flat).wait()

    return act


def test_results_are_there_after_the_wait() -> None:
    def act(lane: Communicator) -> list[float]:
        flats = [torch.full((3,), float(lane.global_rank + n)) for n in range(2)]
        exchanges = [BackgroundExchange(lane, [flat], sums(flat)) for flat in flats]  # type: ignore[arg-type]
        for exchange in reversed(exchanges):
            exchange.wait()
        assert all(exchange.is_done() for exchange in exchanges)
        return [flat[0].item() for flat in flats]

    assert run_ranks(in_process_world(2), act) == [[1.0, 3.0]] * 2


def test_the_next_one_begins_when_the_one_before_has_ended() -> None:
    (lane,) = in_process_world(1)
    goes_on, order = threading.Event(), []

    def first(_: Communicator) -> None:
        assert goes_on.wait(DEADLINE_S)
        order.append("first")

    one = BackgroundExchange(lane, [], first)
    two = BackgroundExchange(lane, [], lambda _: order.append("second"))
    assert not one.is_done() and not two.is_done() and order == []
    goes_on.set()
    two.wait()
    assert order == ["first", "second"]


@pytest.mark.parametrize("error", [CollectiveFailed("a peer is gone"), ZeroDivisionError("a defect")])
def test_after_a_failure_none_begins(error: Exception) -> None:
    (lane,) = in_process_world(1)
    begun = []

    def fails(_: Communicator) -> None:
        raise error

    one = BackgroundExchange(lane, [], fails)
    two = BackgroundExchange(lane, [], begun.append)
    for exchange in (one, two):
        with pytest.raises(type(error), match=str(error)):
            exchange.wait()
    with pytest.raises(type(error)):
        BackgroundExchange(lane, [], begun.append).wait()
    assert begun == []


def test_an_abort_of_the_lane_releases_the_wait() -> None:
    lane, _ = in_process_world(2)
    flat = torch.ones(2)
    exchange = BackgroundExchange(lane, [flat], sums(flat))  # type: ignore[arg-type]
    lane.abort("another generation is in force")
    with pytest.raises(CollectiveAborted, match="another generation"):
        exchange.wait()
