"""An exchange that falls due in a step under `no_sync()` takes place in the next step that is synchronized."""

from __future__ import annotations

import pytest
import torch

from bagua_core.algorithms import Algorithm, Decentralized, LowPrecisionDecentralized
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.state.state_registry import StateRegistry
from tests.core.algorithms.weight_workers import (
    Shares,
    Worker,
    batch,
    loss_of,
    small_model,
    train_all,
    workers,
)
from tests.core.communication.worlds import run_ranks, seeded
from tests.core.elastic.state.trainings import through_the_wire

SIZE, SHARES = 4, Shares.even(4)


def accumulate(worker: Worker, steps: int, every: int) -> None:
    """Steps of one batch each, of which every `every`-th is synchronized and has an optimizer step."""
    for _ in range(steps):
        worker.engine.begin_micro_batch(MicroBatch(1.0 / SIZE, True))
        inputs = batch(worker.rank, worker.engine.step, 0)
        if (worker.engine.step + 1) % every:
            with worker.model.no_sync():
                loss_of(worker.model(inputs)).backward()
        else:
            loss_of(worker.model(inputs)).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        assert worker.end_step()


def be_still(worker: Worker) -> None:
    group = worker.optimizer.param_groups[0]
    group["lr"] = group["momentum"] = 0.0
    group["nesterov"] = False


@pytest.mark.parametrize(
    ("algorithm", "every", "exchanges"),
    [
        (Decentralized(communication_interval=2), 2, 4),
        (LowPrecisionDecentralized(communication_interval=4), 4, 60),
        (Decentralized(peer_selection="shift_one"), 2, 4),
    ],
)
def test_models_meet_although_each_exchange_falls_due_under_no_sync(
    algorithm: Algorithm, every: int, exchanges: int
) -> None:
    members = workers(SIZE, algorithm)

    def act(worker: Worker) -> None:
        accumulate(worker, 3 * every, every)
        worker.set_weights(worker.weights() + worker.rank)
        be_still(worker)
        accumulate(worker, exchanges * every, every)

    run_ranks(members, act)
    for worker in members[1:]:
        torch.testing.assert_close(worker.weights(), members[0].weights(), rtol=0, atol=1e-3)


def test_a_second_model_that_trains_in_odd_steps_alone_is_exchanged() -> None:
    members = workers(SIZE, Decentralized(communication_interval=2))

    def act(worker: Worker) -> None:
        worker.set_weights(worker.weights() + worker.rank)
        be_still(worker)
        for _ in range(4):
            if worker.engine.step % 2:
                assert worker.train(SHARES)
            else:
                assert worker.end_step()  # another model's step

    run_ranks(members, act)
    mean = torch.cat([p.detach().reshape(-1) for p in seeded(small_model).parameters()]) + 1.5
    for worker in members:
        torch.testing.assert_close(worker.weights(), mean)


@pytest.mark.parametrize(
    "algorithm", [Decentralized(peer_selection="shift_one"), Decentralized(communication_interval=3)]
)
def test_a_joiner_follows_the_schedule_that_it_copies(algorithm: Algorithm) -> None:
    """In its first step it does not know the schedule yet: what is due then comes one step later."""
    members = workers(SIZE, algorithm)
    train_all(members, 3, SHARES)
    for worker in members:
        worker.engine.healing = frozenset({3})

    def shadow(worker: Worker) -> None:
        if worker.rank == 3:
            for tensor in worker.model.travelling().values():
                tensor.fill_(-1)  # as a joiner has it
            done = worker.engine.reduction_done

            def arrives(pair: tuple[float, float] | None) -> None:
                done(pair)
                for name, tensor in worker.model.travelling().items():
                    tensor.copy_(members[0].model.travelling()[name])

            worker.engine.reduction_done = arrives  # type: ignore[method-assign]
        be_still(worker)
        worker.set_weights(torch.full_like(worker.weights(), float(worker.rank)))
        assert worker.train(Shares(((1 / 3,), (1 / 3,), (1 / 3,), (0.0,))))

    run_ranks(members, shadow)
    for worker in members:
        assert torch.equal(worker.weights(), torch.full_like(worker.weights(), float(worker.rank)))
        worker.engine.healing = frozenset()
        worker.engine.__dict__.pop("reduction_done", None)
    train_all(members, 3, SHARES)
    for worker in members:
        torch.testing.assert_close(worker.weights(), torch.full_like(worker.weights(), 1.5))
        states = [m.model.travelling().values() for m in (worker, members[0])]
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("algorithm", [Decentralized(), LowPrecisionDecentralized()])
def test_a_checkpoint_without_a_clock_is_continued(algorithm: Algorithm) -> None:
    earlier, worker = StateRegistry(), Worker(None, algorithm)
    earlier.add_model(seeded(small_model, 1), [])
    registry = StateRegistry()
    registry.add_model(worker.inner, [], worker.model.travelling)
    assert registry.fingerprint() == earlier.fingerprint()
    registry.restore(through_the_wire(earlier.capture()))
    assert torch.equal(worker.weights(), torch.cat([p.reshape(-1) for p in earlier.parameters()]))
    (clock,) = worker.model.travelling().values()
    assert clock.tolist() == [-1, 0]
