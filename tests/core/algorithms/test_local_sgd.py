"""Rounds follow the formulas, and a failed round leaves models, anchors and momentum unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bagua_core.algorithms import LocalSGD, find_algorithm
from bagua_core.algorithms.local_sgd import DEFAULT_SYNC_EVERY
from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.parallel import DistributedDataParallel
from tests.core.algorithms.weight_workers import (
    MakeOptimizer,
    Replica,
    Shares,
    Worker,
    adam,
    lossy_world,
    sgd,
    small_model,
    train_all,
    workers,
    world,
)
from tests.core.communication.in_process import InProcessCommunicator
from tests.core.communication.worlds import FakeEngine, gloo_world, run_ranks

PLAIN = LocalSGD(sync_every=3)
NESTEROV = LocalSGD(sync_every=3, outer_optimizer="nesterov", outer_lr=0.7, outer_momentum=0.8)
UINT8 = LocalSGD(sync_every=3, compress="uint8")
BOTH = LocalSGD(sync_every=3, outer_optimizer="nesterov", compress="uint8")
# What one byte a weight may differ by, of changes as large as those here; it goes through two rounds.
LOSS_OF_UINT8 = 0.05


class Rounds:
    """The algorithm in one process; torch's own optimizer is the outer one."""

    def __init__(self, replicas: list[Replica], algorithm: LocalSGD, began: int = 0) -> None:
        self.replicas = replicas
        self.began = began
        self.every = algorithm.sync_every
        self.anchor = torch.nn.Parameter(replicas[0].weights())
        self.outer: torch.optim.Optimizer | None = None
        if algorithm.outer is not None:
            self.outer = torch.optim.SGD(
                [self.anchor], algorithm.outer.lr, algorithm.outer.momentum, nesterov=True
            )

    def exchange(self, step: int) -> None:
        mean = torch.stack([replica.weights() for replica in self.replicas]).mean(0)
        if self.outer is None:
            self.anchor.data.copy_(mean)
        else:
            self.anchor.grad = self.anchor.detach() - mean
            self.outer.step()
        for replica in self.replicas:
            replica.set_weights(self.anchor.detach())
        self.began = step

    def run(self, steps: range, shares: Shares, silent: frozenset[int] = frozenset()) -> None:
        for step in steps:
            if step - self.began >= self.every and step not in silent:
                self.exchange(step)
            for replica in self.replicas:
                replica.learn(step, shares)
                replica.step()


def check(members: list[Worker], rounds: Rounds, atol: float = 1e-5) -> None:
    for worker, replica in zip(members, rounds.replicas, strict=True):
        torch.testing.assert_close(worker.weights(), replica.weights(), rtol=1e-4, atol=atol)
        anchor = worker.model.travelling()["anchor.0"]
        torch.testing.assert_close(anchor, rounds.anchor.detach(), rtol=1e-4, atol=atol)
        assert torch.equal(anchor, members[0].model.travelling()["anchor.0"]), "alike on all, bit for bit"


def test_it_is_found_by_name_and_refuses_what_it_cannot_do() -> None:
    found = find_algorithm("local_sgd")
    assert isinstance(found, LocalSGD)
    assert not found.equal_states and found.sync_every == DEFAULT_SYNC_EVERY
    assert found.described == "local_sgd(every 16, mean, none)"
    assert BOTH.described == "local_sgd(every 3, nesterov 0.7 0.9, uint8)"
    for arguments, text in [
        ({"sync_every": 0}, "sync_every=0; use 1 or more"),
        ({"outer_optimizer": "adam"}, "'adam' is unknown; use None or \"nesterov\""),
        ({"outer_lr": 0.0}, "outer_lr=0.0 must be positive"),
        ({"outer_lr": float("nan")}, "outer_lr=nan must be positive"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 must be"),
        ({"compress": "uint4"}, "'uint4' is unknown; use one of none, uint8"),
    ]:
        with pytest.raises(ValueError, match=text):
            LocalSGD(**arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"local_sgd\(compress='uint8'\) compresses weights of 32 or 16 bits"
    ):
        DistributedDataParallel(nn.Linear(4, 2).double(), None, algorithm=UINT8, engine=FakeEngine())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("algorithm", [PLAIN, NESTEROV, UINT8, BOTH], ids=lambda a: a.described)
def test_rounds(size: int, optimizer: MakeOptimizer, algorithm: LocalSGD) -> None:
    shares = Shares.uneven(size, 2)
    members = workers(size, algorithm, optimizer)
    rounds = Rounds([Replica(r, optimizer) for r in range(size)], algorithm)
    for steps in (range(0, 3), range(3, 4), range(4, 8)):
        train_all(members, len(steps), shares)
        rounds.run(steps, shares)
        check(members, rounds, LOSS_OF_UINT8 if algorithm.compress == "uint8" and size > 1 else 1e-5)


def test_between_rounds_nothing_but_the_vote_travels() -> None:
    main, started = lossy_world(2, at=10**9, by=0)
    members = [Worker(c, PLAIN) for c in main]
    train_all(members, 3, Shares.even(2))
    assert started == ["allreduce"] * 3
    assert not torch.equal(members[0].weights(), members[1].weights())
    train_all(members, 1, Shares.even(2))
    assert started == ["allreduce"] * 5
    assert torch.equal(members[0].seen[3], members[1].seen[3]), "a round begins with equal models"


def test_over_real_connections_in_several_types() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 5).to(torch.float64)
            self.norm = nn.BatchNorm1d(5)
            self.last = nn.Linear(5, 3).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(self.norm(self.first(x.double()).float()).to(torch.bfloat16)).float()
            return y

    main: list[Communicator] = list(gloo_world(3))
    members = [Worker(c, NESTEROV, adam, Mixed) for c in main]
    train_all(members, 10, Shares.uneven(3))
    for worker in members:
        travelling = worker.model.travelling()
        kinds = [travelling[f"anchor.{i}"].dtype for i in range(2)]
        assert kinds == [torch.float64, torch.float32], "half precision has an anchor of more"
        assert torch.equal(worker.seen[9], members[0].seen[9]) and worker.seen[9].isfinite().all()
    for communicator in main:
        communicator.close()


def test_what_travels_is_always_the_same_memory() -> None:
    members = workers(2, NESTEROV)
    before = {name: t.data_ptr() for name, t in members[0].model.travelling().items()}
    assert set(before) == {"anchor.0", "momentum.0", "round_began"}
    train_all(members, 7, Shares.even(2))
    members[0].enter(None)
    assert before == {name: t.data_ptr() for name, t in members[0].model.travelling().items()}
    assert set(workers(1, PLAIN)[0].model.travelling()) == {"anchor.0", "round_began"}


def test_a_model_that_is_loaded_after_it_was_wrapped_is_the_first_anchor() -> None:
    members = workers(2, NESTEROV)
    for worker in members:
        worker.set_weights(worker.weights() + 5.0)
    rounds = Rounds([Replica(r, like=members[r]) for r in range(2)], NESTEROV)
    train_all(members, 5, Shares.even(2))
    rounds.run(range(5), Shares.even(2))
    check(members, rounds)


def test_a_newcomer_heals_with_the_anchor_beside_a_round_that_waits_for_it() -> None:
    """Step 3 would begin a round; rank 2 copies rank 0's state meanwhile. So step 4 begins it, with three."""
    two, shares = workers(2, NESTEROV), Shares.even(2)
    train_all(two, 3, shares)
    rounds = Rounds([Replica(r) for r in range(2)], NESTEROV)
    rounds.run(range(3), shares)
    newcomer = Worker(None, NESTEROV)
    newcomer.set_weights(newcomer.weights() + 100.0)
    newcomer.engine.step = 3
    everybody = [*two, newcomer]
    for worker, communicator in zip(everybody, world(3, generation=2), strict=True):
        worker.enter(communicator)
        worker.engine.healing = frozenset({2})
    copied = Replica(2, like=two[0])
    holder_state = {name: t.clone() for name, t in two[0].model.travelling().items()}
    weights, optimizer_state = two[0].weights(), copy.deepcopy(two[0].optimizer.state_dict())
    note = newcomer.engine.reduction_done

    def arrives(pair: tuple[float, float] | None) -> None:
        note(pair)
        newcomer.set_weights(weights)
        newcomer.optimizer.load_state_dict(optimizer_state)
        for name, tensor in newcomer.model.travelling().items():
            tensor.copy_(holder_state[name])

    newcomer.engine.reduction_done = arrives  # type: ignore[method-assign]
    changes = [worker.engine.parameter_changes for worker in two]
    train_all(everybody, 1, Shares(((0.5,), (0.5,), (0.0,))))
    assert changes == [worker.engine.parameter_changes for worker in two], "copies may be under way"
    newcomer.engine.reduction_done = note  # type: ignore[method-assign]
    rounds.run(range(3, 4), shares, silent=frozenset({3}))
    for parameter in copied.inner.parameters():
        parameter.grad = torch.zeros_like(parameter)
    copied.step()
    rounds.replicas.append(copied)
    check(everybody, rounds)
    for worker in everybody:
        worker.engine.healing = frozenset()
    train_all(everybody, 5, Shares.uneven(3))
    rounds.run(range(4, 9), Shares.uneven(3))
    assert rounds.began == 7
    check(everybody, rounds)


def test_a_newcomer_in_the_very_first_step_takes_the_same_anchor() -> None:
    members = workers(2, NESTEROV)
    late, start = members[1], members[0].weights()
    late.set_weights(start + 100.0)
    for worker in members:
        worker.engine.healing = frozenset({1})
    note = late.engine.reduction_done

    def arrives(pair: tuple[float, float] | None) -> None:
        note(pair)
        late.set_weights(start)

    late.engine.reduction_done = arrives  # type: ignore[method-assign]
    train_all(members, 1, Shares(((1.0,), (0.0,))))
    for worker in members:
        torch.testing.assert_close(worker.model.travelling()["anchor.0"], start)


@pytest.mark.parametrize("algorithm", [PLAIN, NESTEROV, BOTH], ids=lambda a: a.described)
@pytest.mark.parametrize("by", [0, 2])
def test_a_loss_at_any_point(algorithm: LocalSGD, by: int) -> None:
    """Five steps, the fourth begins a round; the world is lost at operation `at` of one rank."""
    shares, at = Shares.even(3), 0
    while True:
        main, started = lossy_world(3, at, by)
        members = [Worker(c, algorithm) for c in main]

        def act(worker: Worker) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
            for _ in range(5):
                before = everything(worker)
                if not worker.train(shares):
                    return False, before, everything(worker)
            return True, before, before

        results = run_ranks(members, act)
        if all(happened for happened, _, _ in results):
            break
        assert len(started) > at, "the fault happened"
        for _, before, after in results:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        _go_on_with_two([members[r] for r in range(3) if r != by], algorithm)
        at += 1
    assert at == len(started) >= 6, "every operation was lost once"


def everything(worker: Worker) -> list[torch.Tensor]:
    return [worker.weights(), *(t.clone() for t in worker.model.travelling().values())]


def _go_on_with_two(survivors: list[Worker], algorithm: LocalSGD) -> None:
    """The step that failed is redone by the survivors: its round too, with what they have."""
    steps = [worker.engine.step for worker in survivors]
    holder = survivors[steps.index(max(steps))]
    for worker in survivors:
        if worker.engine.step < max(steps):
            worker.heal_from(holder)
    for worker, communicator in zip(survivors, world(2, generation=2), strict=True):
        worker.enter(communicator)
    first, travelling = holder.engine.step, holder.model.travelling()
    began = int(travelling["round_began"])
    rounds = Rounds([Replica(w.rank, like=w) for w in survivors], algorithm, max(began, 0))
    if began >= 0:
        rounds.anchor.data.copy_(travelling["anchor.0"])
        if rounds.outer is not None:
            rounds.outer.state[rounds.anchor]["momentum_buffer"] = travelling["momentum.0"].clone()
    train_all(survivors, 4, Shares.even(2))
    rounds.run(range(first, first + 4), Shares.even(2))
    check(survivors, rounds, LOSS_OF_UINT8 if algorithm.compress == "uint8" else 1e-5)


def test_a_round_whose_vote_fails_is_put_back_and_missed_votes_heal() -> None:
    members = workers(2, NESTEROV)
    train_all(members, 3, Shares.even(2))
    late = members[1]

    def is_missed(pair: object) -> None:
        late.engine.reduction_failed(CollectiveFailed("lost at the vote"))

    late.engine.reduction_done = is_missed  # type: ignore[method-assign]
    before = everything(late)
    assert run_ranks(members, lambda worker: worker.train(Shares.even(2))) == [True, False]
    assert torch.equal(late.seen[3], members[0].seen[3]), "its forward ran on the new model"
    assert all(torch.equal(a, b) for a, b in zip(before, everything(late), strict=True))
    del late.engine.reduction_done
    _go_on_with_two(members, NESTEROV)


def test_a_later_part_that_fails_takes_nothing_of_the_round_back() -> None:
    members = workers(2, NESTEROV)
    train_all(members, 3, Shares.even(2))

    def act(worker: Worker) -> None:
        worker.optimizer.zero_grad()
        worker.model(torch.ones(2, 6)).sum().backward()
        worker.optimizer.step()
        after = everything(worker)
        worker.engine.failed = CollectiveFailed("another model's reduction")
        assert not worker.end_step()
        assert all(torch.equal(a, b) for a, b in zip(after, everything(worker), strict=True))
        worker.engine.failed = None
        worker.model(torch.ones(2, 6))  # the step again: its round has begun already
        assert torch.equal(worker.weights(), after[0])

    run_ranks(members, act)


@pytest.mark.parametrize("algorithm", [PLAIN, BOTH], ids=lambda a: a.described)
def test_a_round_that_was_given_up_may_go_on_writing(algorithm: LocalSGD) -> None:
    members = workers(2, algorithm)
    train_all(members, 3, Shares.even(2))
    lonely, later = members

    def gives_up(pending: object) -> None:
        raise CollectiveFailed("rank 1 is gone")

    kept = everything(lonely)
    lonely.engine.wait = gives_up  # type: ignore[method-assign,assignment]
    lonely.model(torch.ones(2, 6))
    assert not lonely.end_step()
    torch._foreach_zero_(lonely.exchange._next.flats)  # type: ignore[attr-defined]
    main = later.engine.communicator()
    assert isinstance(main, InProcessCommunicator)
    later.engine.wait = gives_up  # type: ignore[method-assign,assignment]
    later.model(torch.ones(2, 6))  # now the operation of the step before completes
    assert not any(flat.any() for flat in lonely.exchange._next.flats)  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(kept, everything(lonely), strict=True))


def test_a_world_of_one_just_trains() -> None:
    worker, replica = Worker(None, PLAIN), Replica(0)
    for step in range(7):
        assert worker.train(Shares.even(1))
        replica.learn(step, Shares.even(1))
        replica.step()
    assert torch.equal(worker.weights(), replica.weights())


def test_replicas_end_equal() -> None:
    members = workers(3, PLAIN)
    train_all(members, 5, Shares.even(3))
    mean = torch.stack([worker.weights() for worker in members]).mean(0)

    def act(worker: Worker) -> torch.Tensor:
        communicator = worker.engine.communicator()
        assert communicator is not None

        def average(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.clone()
            communicator.allreduce(result).wait()
            return result / 3

        worker.model.finish(average)
        return worker.weights()

    ends = run_ranks(members, act)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    torch.testing.assert_close(ends[0], mean)


def test_the_tests_model_is_compressed_in_parts_of_unequal_length() -> None:
    """So that padding is tried: 53 weights among two, three and four."""
    assert sum(p.numel() for p in small_model().parameters()) == 53
