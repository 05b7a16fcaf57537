"""Models are averaged in the background without stopping any worker, and a round that ends early leaves no trace."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from bagua_core.algorithms import AsyncModelAverage, find_algorithm
from bagua_core.algorithms.async_model_average import AsyncExchange
from bagua_core.communication.communicator import CollectiveAborted, Communicator, Lane, Pending
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.communication.weights.background_mean import BackgroundMean
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded

LIMIT_S = 5.0


class Worker:
    def __init__(self, communicator: Communicator | None, algorithm: AsyncModelAverage, rank: int) -> None:
        self.rank = rank
        self.engine = FakeEngine(communicator)
        inner = seeded(lambda: nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        self.model = DistributedDataParallel(inner, [self.optimizer], algorithm, engine=self.engine)
        exchange = self.model._exchange
        assert isinstance(exchange, AsyncExchange)
        self.exchange = exchange

    def step(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.full((3, 4), scale)).sum() / 3).backward()
        if not self.engine.step_failed:
            self.optimizer.step()
            self.engine.step += 1
            self.model.step_committed()
        else:
            self.model.step_rolled_back()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.model.parameters()])

    def shift(self, by: float) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p += by


def workers(
    size: int, algorithm: AsyncModelAverage | None = None, generation: int = 1
) -> tuple[list[Worker], list[Communicator]]:
    main, beside = in_process_world(size, generation), in_process_world(size, generation)
    for a, b in zip(main, beside, strict=True):
        a.lanes = {Lane.BACKGROUND: b}
    chosen = algorithm or AsyncModelAverage(sync_interval_ms=0)
    return [Worker(c, chosen, c.global_rank) for c in main], beside


def test_it_is_found_by_name_and_refuses_what_it_cannot_do() -> None:
    assert isinstance(find_algorithm("async"), AsyncModelAverage)
    assert AsyncModelAverage(warmup_steps=3).described == "async(warmup_steps=3)"
    for arguments, text in [
        ({"peer_selection_mode": "ring"}, "'ring' is unknown"),
        ({"sync_interval_ms": -1}, "sync_interval_ms=-1"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ]:
        with pytest.raises(ValueError, match=text):
            AsyncModelAverage(**arguments)


def test_averages_of_two_models_are_refused() -> None:
    """Each worker begins them by its own clock, in an order of its own."""
    engine = FakeEngine(None)
    nets = [nn.Linear(4, 2) for _ in range(3)]
    first = DistributedDataParallel(nets[0], None, algorithm="async", engine=engine)
    with pytest.raises(ValueError, match="wrap one module that contains both"):
        DistributedDataParallel(nets[1], None, algorithm="async", engine=engine)
    DistributedDataParallel(nets[1], None, engine=engine)
    first.detach()
    DistributedDataParallel(nets[2], None, algorithm=AsyncModelAverage(unit="round"), engine=engine)


def test_averages_of_two_models_take_turns_by_a_pause() -> None:
    engine = FakeEngine(None)
    first = DistributedDataParallel(nn.Linear(4, 2), None, algorithm="async", engine=engine)._exchange
    assert isinstance(first, AsyncExchange)
    first.pause()
    second = DistributedDataParallel(nn.Linear(4, 2), None, algorithm="async", engine=engine)
    with pytest.raises(ValueError, match="pause the other model's averages"):
        first.resume()
    second.detach()
    first.resume()


def test_a_round_moves_every_model_to_the_mean_and_keeps_what_was_learned_meanwhile() -> None:
    members, _ = workers(3)

    def act(w: Worker) -> tuple[torch.Tensor, torch.Tensor]:
        w.shift(float(w.rank))  # the mean is one above rank 0's
        w.step()  # the round begins with the forward
        at_begin = seeded(lambda: nn.Linear(4, 2))
        began = torch.cat([p.detach().reshape(-1) for p in at_begin.parameters()]) + w.rank
        assert w.exchange.wait_for_round(LIMIT_S)
        learned = w.weights() - began
        w.exchange.pause()
        w.exchange.forward_begins()
        assert w.exchange.rounds == 1 and w.engine.parameter_changes == 1
        return w.weights(), began - w.rank + 1.0 + learned

    for result, expected in run_ranks(members, act):
        torch.testing.assert_close(result, expected)


def test_gradients_stay_at_home_and_are_the_mean_of_the_own_samples() -> None:
    members, _ = workers(2, AsyncModelAverage(sync_interval_ms=60_000))

    def act(w: Worker) -> None:
        w.engine.current = MicroBatch(0.25 if w.rank else 0.75, True)
        w.step(scale=1.0 + w.rank)
        gradient = w.model.module.weight.grad
        torch.testing.assert_close(gradient, torch.full_like(gradient, 1.0 + w.rank))
        assert w.engine.pairs == [(0.0, 0.0)]  # the vote that makes a step final

    run_ranks(members, act)


def test_micro_batches_count_by_their_samples() -> None:
    members, _ = workers(2, AsyncModelAverage(sync_interval_ms=60_000))

    def act(w: Worker) -> None:
        w.optimizer.zero_grad()
        for weight, last, scale in [(0.25, False, 1.0), (0.125, True, 4.0)]:
            w.engine.current = MicroBatch(weight, last)
            (w.model(torch.full((3, 4), scale)).sum() / 3).backward()
        gradient = w.model.module.weight.grad
        torch.testing.assert_close(gradient, torch.full_like(gradient, (0.25 + 0.5) / 0.375))

    run_ranks(members, act)


def test_warm_up_averages_gradients_and_begins_no_round() -> None:
    members, _ = workers(2, AsyncModelAverage(sync_interval_ms=0, warmup_steps=2))

    def act(w: Worker) -> list[torch.Tensor]:
        seen = []
        for _ in range(2):
            w.step(scale=1.0 + w.rank)
            assert w.exchange.wait_for_round(0.0) and w.exchange.rounds == 0
            seen.append(w.weights())
        w.step(scale=1.0 + w.rank)
        assert w.exchange.wait_for_round(LIMIT_S)
        return [*seen, w.weights()]

    first, second = run_ranks(members, act)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])


def test_a_paused_worker_takes_part_in_no_further_round_and_stops_no_other() -> None:
    members, _ = workers(2)

    def act(w: Worker) -> None:
        if w.rank == 1:
            w.exchange.pause()
        for _ in range(5):
            w.step()
        assert w.exchange.rounds == 0
        if w.rank == 1:
            w.exchange.resume()
        w.step()
        assert w.exchange.wait_for_round(LIMIT_S)
        # Whatever begins with the last step is not waited for: a worker may be one round ahead of the other.
        w.step()
        assert w.exchange.rounds >= 1

    run_ranks(members, act)


def test_another_generation_ends_the_round_without_a_trace() -> None:
    members, beside = workers(2)
    lonely = members[0]
    lonely.engine.current = MicroBatch(1.0, True)
    lonely.engine.in_step = True
    lonely.exchange.forward_begins()  # rank 1 never comes
    assert not lonely.exchange.wait_for_round(0.0)
    before = lonely.weights()
    lonely.engine.enter(None)
    lonely.model.communicator_changed()
    assert beside[0].abort_flag.is_set()
    assert lonely.exchange.wait_for_round(0.0)
    lonely.exchange.forward_begins()
    assert torch.equal(lonely.weights(), before) and lonely.exchange.rounds == 0


def test_a_peer_lost_in_a_round_changes_nothing_here() -> None:
    members, beside = workers(2)
    survivor = members[0]
    survivor.exchange.forward_begins()
    before = survivor.weights()
    beside[0].abort("rank 1 is gone")
    assert survivor.exchange.wait_for_round(LIMIT_S)
    survivor.model.step_rolled_back()
    survivor.exchange.forward_begins()
    assert torch.equal(survivor.weights(), before) and survivor.exchange.rounds == 0


def test_a_wrapping_that_ended_in_the_middle_of_a_round_brings_another_lane() -> None:
    """By a failed step, after which the job forms a generation: on a lane that was given up no round ends."""
    members, _ = workers(2)
    earlier = members[0]
    earlier.exchange.forward_begins()  # rank 1 never comes
    assert not earlier.exchange.wait_for_round(0.0)
    earlier.model.detach()
    later = DistributedDataParallel(
        earlier.model.module,
        [earlier.optimizer],
        AsyncModelAverage(sync_interval_ms=0),
        engine=earlier.engine,
    )
    later._exchange.forward_begins()
    assert isinstance(earlier.engine.failed, CollectiveAborted)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_round_without_memory_changes_no_model_and_is_an_error(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory may be scarce: that is no peer's doing."""

    def allreduce(*_: object) -> Pending:
        raise MemoryError("no pinned memory is left")

    lane = in_process_world(1)[0]
    monkeypatch.setattr(lane, "allreduce", allreduce)
    parameter = nn.Parameter(torch.ones(4))
    mean = BackgroundMean([parameter], FakeEngine(None), 0.0, weighted=weighted)
    mean.trained(0.5)
    mean.begin_if_due(lane)
    assert mean.wait(LIMIT_S)
    with pytest.raises(MemoryError, match="no pinned memory"):
        mean.take_in()
    assert parameter.tolist() == [1.0] * 4 and mean.count == 0


def test_an_average_that_a_peer_broke_leaves_its_buffers_to_the_operation_that_was_given_up() -> None:
    """A step that fails comes to the next generation before a forward has looked at the average. The transport may
    still write into the buffers."""
    lanes = in_process_world(2)
    mean = BackgroundMean([nn.Parameter(torch.ones(4))], FakeEngine(lanes[0]), 0.0)
    mean.begin_if_due(lanes[0])  # rank 1 never comes
    given_up = mean._mean
    lanes[0].abort("rank 1 is gone")
    assert mean.wait(LIMIT_S)
    mean.give_up("another generation is in force")
    assert not any(new is old for new in mean._mean for old in given_up)


def test_a_newcomer_begins_no_round_before_it_has_the_model() -> None:
    members, _ = workers(2)
    both_looked = threading.Barrier(2)

    def act(w: Worker) -> None:
        w.engine.healing = frozenset({1})
        w.exchange.forward_begins()
        assert w.exchange.wait_for_round(0.0) == (w.rank == 1)
        both_looked.wait(LIMIT_S)  # or the newcomer's round could end the other's before that looks
        w.model.step_committed()
        w.engine.healing = frozenset()
        w.exchange.forward_begins()
        assert w.exchange.wait_for_round(LIMIT_S)

    run_ranks(members, act)


def test_replicas_end_equal() -> None:
    members, _ = workers(2, AsyncModelAverage(sync_interval_ms=60_000))

    def act(w: Worker) -> torch.Tensor:
        w.step(scale=1.0 + w.rank)
        communicator = w.engine.communicator()
        assert communicator is not None

        def average(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.clone()
            communicator.allreduce(result).wait()
            return result / 2

        w.model.finish(average)
        return w.weights()

    first, second = run_ranks(members, act)
    assert torch.equal(first, second)


def test_a_world_of_one_just_trains() -> None:
    worker = Worker(None, AsyncModelAverage(sync_interval_ms=0), 0)
    before = worker.weights()
    worker.step()
    assert worker.exchange.rounds == 0 and not torch.equal(worker.weights(), before)


def test_weights_stay_within_a_step_whose_forwards_come_before_its_backward() -> None:
    members, _ = workers(2)

    def act(w: Worker) -> None:
        w.shift(float(w.rank))
        w.step()
        assert w.exchange.wait_for_round(LIMIT_S)
        for _ in range(2):
            x = torch.ones(3, 4)
            first = w.model(x).square().sum()
            assert w.exchange.wait_for_round(LIMIT_S)
            second = w.model(x).sum()  # the round that began with the first forward is in
            (first + second).backward()
            w.optimizer.step()
            w.model.step_committed()
        assert w.exchange.rounds == 2

    run_ranks(members, act)


def test_parameters_that_no_worker_uses_keep_no_gradient_if_asked_for() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.used(x)
            return y

    def act(communicator: Communicator) -> None:
        engine, inner = FakeEngine(communicator), Spare()
        algorithm = AsyncModelAverage(sync_interval_ms=60_000, warmup_steps=1)
        model = DistributedDataParallel(
            inner, None, algorithm=algorithm, find_unused_parameters=True, engine=engine
        )
        for step in range(2):
            engine.step = step
            inner.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            assert inner.spare.weight.grad is None and inner.used.weight.grad is not None, f"step {step}"
            model.step_committed()

    world = in_process_world(2)
    for main, beside in zip(world, in_process_world(2), strict=True):
        main.lanes = {Lane.BACKGROUND: beside}
    run_ranks(world, act)
