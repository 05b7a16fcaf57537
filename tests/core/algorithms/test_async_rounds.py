"""Asynchronous averaging in rounds: averages begin and come in at commits, and the model of a round's begin is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_core.algorithms import AsyncModelAverage, StreamingDiLoCo
from bagua_core.algorithms.algorithm import Attachment
from bagua_core.algorithms.async_rounds import AsyncRounds
from bagua_core.communication.communicator import CollectiveAborted, Communicator, Lane, ReduceOp
from tests.core.communication.worlds import DEADLINE_S, FakeEngine, in_process_world, run_ranks

ALGORITHM = AsyncModelAverage(sync_interval_ms=0, unit="round", sync_every=8)


class Member:
    """One worker's exchange; its model is four equal numbers."""

    def __init__(self, communicator: Communicator, lane: Communicator, value: float) -> None:
        communicator.lanes = {Lane.BACKGROUND: lane}
        self.lane = lane
        self.parameter = nn.Parameter(torch.full((4,), value))
        self.engine = FakeEngine(communicator)
        exchange = ALGORITHM.attach(Attachment((self.parameter,), [], self.engine, 1 << 20))
        assert isinstance(exchange, AsyncRounds)
        self.exchange = exchange

    @property
    def value(self) -> float:
        return float(self.parameter.detach()[0])

    def learn(self, change: float) -> None:
        self.exchange.forward_begins()
        self.parameter.data.add_(change)

    def commit(self, part: float | None = None) -> None:
        """part: of the round's samples, this worker's."""
        if part is not None:
            self.exchange.close_round(self.engine.communicator(), part)
        self.exchange.step_committed()
        self.engine.step += 1


def members(*values: float) -> list[Member]:
    main, beside = in_process_world(len(values)), in_process_world(len(values))
    return [Member(*each) for each in zip(main, beside, values, strict=True)]


def await_averages(world: list[Member]) -> None:
    assert all(member.exchange.wait_for_round(DEADLINE_S) for member in world)


def test_an_average_comes_in_at_the_next_commit_and_keeps_what_was_learned_meanwhile() -> None:
    world = members(0.0, 2.0)
    for member in world:
        member.learn(1.0)
        member.commit()  # sends 1 and 3
    await_averages(world)
    for member in world:
        member.learn(0.5)
    assert [member.value for member in world] == [1.5, 3.5], "it came in within a round"
    for member in world:
        member.commit()
    assert [member.value for member in world] == [2.5, 2.5]
    assert [member.exchange.rounds for member in world] == [1, 1]


def test_an_average_holds_committed_rounds_alone() -> None:
    world = members(0.0, 2.0)
    world[0].commit()
    world[1].learn(8.0)  # in a round that is not committed
    assert not world[0].exchange.wait_for_round(0.0), "it waits for the other's commit"
    world[1].commit()
    await_averages(world)
    world[0].commit()
    assert world[0].value == 5.0


def test_models_count_by_the_samples_that_their_workers_trained_on_since_the_last_average() -> None:
    world = members(0.0, 8.0)
    for member, part in zip(world, (0.75, 0.25), strict=True):
        member.commit(part)
    await_averages(world)
    for member, part in zip(world, (0.25, 0.75), strict=True):
        member.commit(part)  # takes in 0.75 of 0 and 0.25 of 8, and sends the next average
    assert [member.value for member in world] == [2.0, 2.0]
    world[0].parameter.data.add_(4.0)  # after the next average began: 2 is in it
    await_averages(world)
    for member in world:
        member.commit(0.5)
    assert [member.value for member in world] == [6.0, 2.0]
    await_averages(world)
    for member in world:
        member.commit()
    assert [member.value for member in world] == [4.0, 4.0]


def test_what_a_worker_trained_counts_in_the_next_average_where_one_was_given_up() -> None:
    world = members(0.0, 8.0)
    for member, part in zip(world, (0.75, 0.25), strict=True):
        member.commit(part)
    await_averages(world)
    for member in world:
        member.exchange.communicator_changed()
        member.commit(0.5)  # now they have 1.25 and 0.75 of two rounds
    await_averages(world)
    for member in world:
        member.commit()
    assert [member.value for member in world] == [3.0, 3.0]


def test_a_copied_model_counts_by_what_its_worker_trained_since_the_copy() -> None:
    world = members(0.0, 8.0)
    for member in world:
        member.commit(0.5)
    await_averages(world)
    for member in world:  # another generation, in which the second copies the first one's state
        member.exchange.communicator_changed()
    world[1].parameter.data.fill_(4.0)
    world[1].exchange.state_replaced()
    for member, part in zip(world, (0.25, 0.75), strict=True):
        member.commit(part)  # 0.75 each
    await_averages(world)
    for member in world:
        member.commit()
    assert [member.value for member in world] == [2.0, 2.0]


def test_models_of_workers_that_trained_nothing_count_alike() -> None:
    world = members(0.0, 8.0)
    for member in world:
        member.commit(0.0)
    await_averages(world)
    for member in world:
        member.commit()
    assert [member.value for member in world] == [4.0, 4.0]


def test_the_mean_at_the_end_counts_what_no_average_has() -> None:
    world = members(0.0, 8.0)
    for member, part in zip(world, (0.75, 0.25), strict=True):
        member.exchange.pause()
        member.commit(part)

    def end(member: Member) -> None:
        communicator = member.engine.communicator()
        assert communicator is not None

        def average(tensor: torch.Tensor) -> torch.Tensor:
            mean = tensor.clone()
            communicator.allreduce(mean, ReduceOp.AVG).wait()
            return mean

        member.exchange.finish(average)

    run_ranks(world, end)
    assert [member.value for member in world] == [2.0, 2.0]


def test_another_generation_drops_the_average_under_way() -> None:
    world = members(0.0, 2.0)
    for member in world:
        member.commit()
    await_averages(world)
    world[0].exchange.communicator_changed()
    world[0].commit()
    assert (world[0].value, world[0].exchange.rounds) == (0.0, 0)


def test_the_model_of_the_rounds_begin_is_kept_also_when_the_round_is_closed_again() -> None:
    member = members(1.0, 1.0)[0]
    with member.exchange.at_round_begin():
        assert member.value == 1.0, "no local step was taken"
    member.learn(1.0)
    member.learn(1.0)
    member.exchange.step_rolled_back()
    member.exchange.communicator_changed()
    member.exchange.forward_begins()
    with member.exchange.at_round_begin():
        assert member.value == 1.0
    assert member.value == 3.0
    member.commit()
    member.learn(1.0)
    with member.exchange.at_round_begin():
        assert member.value == 3.0


def test_a_copied_model_goes_back_to_no_begin_of_the_round_that_its_worker_had() -> None:
    """As in a round that a loss broke: the copier takes over the model of another in the same round."""
    member = members(1.0, 1.0)[0]
    member.learn(1.0)
    member.parameter.data.fill_(8.0)  # the copy
    member.exchange.state_replaced()
    with member.exchange.at_round_begin():
        assert member.value == 8.0
    member.learn(1.0)
    with member.exchange.at_round_begin():
        assert member.value == 8.0
    assert member.value == 9.0


def test_rounds_are_a_part_of_the_fingerprint_and_wrong_settings_are_refused() -> None:
    assert (ALGORITHM.described, ALGORITHM.round_steps) == ("async(every 8, unit round)", 8)
    assert AsyncModelAverage().round_steps is None
    with pytest.raises(ValueError, match="unit='epoch' is unknown"):
        AsyncModelAverage(unit="epoch")
    with pytest.raises(ValueError, match="sync_every=0"):
        AsyncModelAverage(unit="round", sync_every=0)
    with pytest.raises(ValueError, match="warmup_steps=3 averages gradients in each step"):
        AsyncModelAverage(unit="round", warmup_steps=3)
    with pytest.raises(
        ValueError, match="fragments are sent and applied in steps that all workers count alike"
    ):
        StreamingDiLoCo(unit="round")


def test_a_wrapping_that_ended_in_the_middle_of_an_average_brings_another_lane() -> None:
    """By a round that is closed again, in another generation: on a lane that was given up no average ends."""
    world = members(0.0, 2.0)
    world[0].learn(1.0)
    world[0].commit()  # the other one never comes
    world[0].exchange.close()
    later = ALGORITHM.attach(Attachment((world[0].parameter,), [], world[0].engine, 1 << 20))
    with pytest.raises(CollectiveAborted, match="given up by an earlier wrapping"):
        later.close_round(world[0].engine.communicator(), 0.5)
