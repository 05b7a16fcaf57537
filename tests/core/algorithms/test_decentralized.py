"""Weights are exchanged by the formulas and beside the step, and a failed step leaves them unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_core.algorithms import Decentralized, find_algorithm
from bagua_core.algorithms.decentralized import DecentralizedExchange
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Lane
from bagua_core.communication.topology.peer_selection import PeerSelectionError, shift_one
from bagua_core.parallel import DistributedDataParallel
from tests.core.algorithms.weight_workers import (
    MakeOptimizer,
    Replica,
    Shares,
    Worker,
    adam,
    lossy_world,
    sgd,
    train_all,
    workers,
    world,
)
from tests.core.communication.in_process import InProcessCommunicator
from tests.core.communication.worlds import FakeEngine, gloo_world, run_ranks

Pairs = list[tuple[int, ...]]  # groups whose members average, in each step
Nodes = tuple[tuple[int, ...], ...]


def simulate(
    size: int, steps: int, shares: Shares, optimizer: MakeOptimizer, groups_of: list[Pairs]
) -> list[torch.Tensor]:
    """x = mean over the rank's group - update(gradient at the old x); groups_of[step]."""
    replicas = [Replica(r, optimizer) for r in range(size)]
    for step in range(steps):
        for replica in replicas:
            replica.learn(step, shares)
        before = [replica.weights() for replica in replicas]
        for group in groups_of[step]:
            mean = torch.stack([before[r] for r in group]).double().mean(0).float()
            for r in group:
                replicas[r].set_weights(mean)
        for replica in replicas:
            replica.step()
    return [replica.weights() for replica in replicas]


def check(members: list[Worker], expected: list[torch.Tensor]) -> None:
    for worker, weights in zip(members, expected, strict=True):
        torch.testing.assert_close(worker.weights(), weights, rtol=1e-4, atol=1e-5)


def pairs_of(size: int, step: int) -> Pairs:
    found = {(i, shift_one(step, i, size)) for i in range(size)}
    return [(i, j) for i, j in found if j is not None and i < j]


def test_it_is_found_by_name_and_refuses_what_it_cannot_do() -> None:
    found = find_algorithm("decentralized")
    assert isinstance(found, Decentralized)
    assert found.described == "decentralized(True, all, every 1)"
    assert not found.equal_states
    assert found.lanes == {Lane.NODE, Lane.LEADERS} and not Decentralized(False).lanes
    assert "shift_one, every 3" in Decentralized(True, "shift_one", 3).described
    assert "pairs_of" in Decentralized(peer_selection=pairs_of).described  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'ring' is unknown; use one of all, shift_one, or a function"):
        Decentralized(peer_selection="ring")
    with pytest.raises(ValueError, match="communication_interval=0"):
        Decentralized(communication_interval=0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_mean_over_all(size: int, optimizer: MakeOptimizer, parts: int) -> None:
    steps, shares = 4, Shares.uneven(size, parts)
    members = workers(size, Decentralized(), optimizer)
    train_all(members, steps, shares)
    check(members, simulate(size, steps, shares, optimizer, [[tuple(range(size))]] * steps))
    for worker in members:
        assert worker.engine.pairs == [(0.0, 0.0)] * steps  # the vote


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_pairs_that_shift(size: int, optimizer: MakeOptimizer) -> None:
    steps, shares = 5, Shares.uneven(size, 2)
    members = workers(size, Decentralized(peer_selection="shift_one"), optimizer)
    train_all(members, steps, shares)
    groups_of = [pairs_of(size, step) for step in range(steps)]
    check(members, simulate(size, steps, shares, optimizer, groups_of))


def test_pairs_that_the_script_names() -> None:
    def ends(number: int, index: int, count: int) -> int | None:
        """The first and the last, in every other exchange."""
        return {0: count - 1, count - 1: 0}.get(index) if number % 2 else None

    steps, shares = 4, Shares.even(3)
    members = workers(3, Decentralized(peer_selection=ends))
    train_all(members, steps, shares)
    check(members, simulate(3, steps, shares, sgd, [[], [(0, 2)], [], [(0, 2)]]))


def test_a_selection_that_is_no_pairing_is_refused_before_anybody_waits() -> None:
    members = workers(3, Decentralized(peer_selection=lambda number, index, count: (index + 1) % count))

    def act(worker: Worker) -> None:
        with pytest.raises(PeerSelectionError, match="two peers must name each other"):
            worker.train(Shares.even(3))

    run_ranks(members, act)


@pytest.mark.parametrize("select", ["all", "shift_one"])
def test_an_interval(select: str) -> None:
    steps, shares = 6, Shares.even(4)
    members = workers(4, Decentralized(peer_selection=select, communication_interval=2))
    train_all(members, steps, shares)
    groups = [[(0, 1, 2, 3)] if select == "all" else pairs_of(4, step // 2) for step in range(steps)]
    check(
        members,
        simulate(4, steps, shares, sgd, [g if s % 2 == 0 else [] for s, g in enumerate(groups)]),
    )


@pytest.mark.parametrize(
    "nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3,)), ((0, 1, 2, 3),)]
)
def test_hierarchical_is_the_same_mean(nodes: Nodes) -> None:
    steps, shares = 3, Shares.uneven(4)
    members = workers(4, Decentralized(), nodes=nodes)
    train_all(members, steps, shares)
    check(members, simulate(4, steps, shares, sgd, [[(0, 1, 2, 3)]] * steps))


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3, 4)), ((0, 1), (2,), (3, 4)), ((0, 1, 2, 3, 4),)])
def test_hierarchical_pairs_are_pairs_of_nodes(nodes: Nodes) -> None:
    """Each node's mean, then the mean of two nodes."""
    members = workers(5, Decentralized(peer_selection="shift_one"), nodes=nodes)
    for worker in members:
        worker.set_weights(torch.full_like(worker.weights(), float(2**worker.rank)))
    of_node = [sum(2.0**r for r in ranks) / len(ranks) for ranks in nodes]
    for step in range(3):
        for worker in members:
            worker.optimizer.param_groups[0]["lr"] = 0.0
        train_all(members, 1, Shares.even(5))
        for i, j in pairs_of(len(nodes), step):
            of_node[i] = of_node[j] = (of_node[i] + of_node[j]) / 2
        for mean, ranks in zip(of_node, nodes, strict=True):
            for r in ranks:
                torch.testing.assert_close(members[r].weights(), torch.full_like(members[r].weights(), mean))


@pytest.mark.parametrize("algorithm", [Decentralized(), Decentralized(peer_selection="shift_one")])
@pytest.mark.parametrize("nodes", [(), ((0, 1), (2,))])
def test_over_real_connections_with_buffers_between(algorithm: Decentralized, nodes: Nodes) -> None:
    """Weights of two types and BatchNorm's statistics share the main communicator."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 5)
            self.norm = nn.BatchNorm1d(5)
            self.last = nn.Linear(5, 3).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(self.norm(self.first(x)).to(torch.bfloat16)).float()
            return y

    main: list[Communicator] = list(gloo_world(3))
    if nodes:
        of_lanes = [dict[Lane, Communicator](), dict[Lane, Communicator](), dict[Lane, Communicator]()]
        for lane, ranks in ((Lane.NODE, (0, 1)), (Lane.NODE, (2,)), (Lane.LEADERS, (0, 2))):
            for rank, communicator in zip(ranks, gloo_world(len(ranks)), strict=True):
                of_lanes[rank][lane] = communicator
        for communicator, own in zip(main, of_lanes, strict=True):
            communicator.nodes, communicator.lanes = nodes, own
    members = [Worker(c, algorithm, adam, Normed) for c in main]

    def act(worker: Worker) -> None:
        worker.set_weights(worker.weights() + worker.rank)
        for _ in range(6):
            assert worker.train(Shares.uneven(3))
        worker.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(24):
            assert worker.train(Shares.uneven(3))
        worker.model(torch.ones(4, 6))  # begins with rank 0's buffers

    run_ranks(members, act)
    weights = [worker.weights() for worker in members]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=2e-2, atol=2e-2)
    buffers = [torch.cat([b.double().reshape(-1) for b in w.inner.buffers()]) for w in members]
    assert torch.equal(buffers[0], buffers[1]) and torch.equal(buffers[0], buffers[2])
    for communicator in main:
        communicator.close()


def test_a_forward_waits_for_no_peer() -> None:
    """The exchange has begun and the peer is silent."""
    alone = workers(2, Decentralized())[0]
    output = alone.model(torch.ones(2, 6))
    assert output.shape == (2, 3)
    alone.engine.failed = CollectiveFailed("given up")
    assert not alone.end_step()


@pytest.mark.parametrize("nodes", [(), ((0, 1), (2, 3)), ((0, 1, 2), (3,))])
def test_newcomers_count_nothing_and_take_the_mean(nodes: Nodes) -> None:
    """Rank 2 and 3 heal beside the step: their copy arrives with the end of the reduction."""
    members = workers(4, Decentralized(), nodes=nodes)
    shares = Shares(((0.5,), (0.5,), (0.0,), (0.0,)))
    start = members[0].weights()
    members[1].set_weights(start + 1.0)
    for worker in members:
        worker.engine.healing = frozenset({2, 3})
        worker.optimizer.param_groups[0]["momentum"] = 0.0
        worker.optimizer.param_groups[0]["nesterov"] = False

    def act(worker: Worker) -> None:
        if worker.rank >= 2:
            worker.set_weights(torch.full_like(start, 1e6))
            note = worker.engine.reduction_done

            def arrives(pair: tuple[float, float] | None) -> None:
                note(pair)
                worker.set_weights(start)

            worker.engine.reduction_done = arrives  # type: ignore[method-assign]
        assert worker.train(shares)

    run_ranks(members, act)
    for worker in members[2:]:
        torch.testing.assert_close(worker.weights(), start + 0.5)
    assert not torch.equal(members[0].weights(), members[1].weights())
    torch.testing.assert_close(members[0].seen[0], start)


@pytest.mark.parametrize("nodes", [(), ((0, 1), (2,))])
def test_with_pairs_newcomers_have_no_peer(nodes: Nodes) -> None:
    members = workers(3, Decentralized(peer_selection="shift_one"), nodes=nodes)
    for worker in members:
        worker.engine.healing = frozenset({2})
    start = members[0].weights()
    run_ranks(members, lambda worker: worker.train(Shares(((0.5,), (0.5,), (0.0,)))))
    assert torch.equal(members[2].weights(), start)  # as the copy brought it, for its gradient is zero
    assert not torch.equal(members[0].weights(), start)


ALGORITHMS = [
    (Decentralized(), ()),
    (Decentralized(peer_selection="shift_one"), ()),
    (Decentralized(), ((0, 1), (2,))),
    (Decentralized(peer_selection="shift_one"), ((0, 1), (2,))),
]


@pytest.mark.parametrize(("algorithm", "nodes"), ALGORITHMS)
@pytest.mark.parametrize("by", [0, 2])
def test_a_loss_at_any_point_leaves_the_weights_and_the_next_generation_goes_on(
    algorithm: Decentralized, nodes: Nodes, by: int
) -> None:
    shares, at = Shares.even(3), 0
    while True:
        main, started = lossy_world(3, at, by, nodes)
        members = [Worker(c, algorithm) for c in main]

        def act(worker: Worker) -> tuple[torch.Tensor, torch.Tensor, bool]:
            worker.set_weights(worker.weights() + worker.rank)
            before = worker.weights()
            return before, worker.weights() if not worker.train(shares) else before, not worker.engine.failed

        results = run_ranks(members, act)
        if all(happened for _, _, happened in results):
            break
        assert len(started) > at, "the fault happened"
        for before, after, happened in results:
            assert happened or torch.equal(before, after)
        _go_on_with_two(members, algorithm)
        at += 1
    assert at == len(started) >= 2, "every operation was lost once"


def _go_on_with_two(members: list[Worker], algorithm: Decentralized) -> None:
    """Ranks 0 and 1 of the world that is lost; the one that missed the commit heals from one that did not."""
    survivors = members[:2]
    steps = max(worker.engine.step for worker in survivors)
    holder = next(worker for worker in survivors if worker.engine.step == steps)
    for worker in survivors:
        if worker.engine.step < steps:
            worker.heal_from(holder)
    for worker, communicator in zip(survivors, world(2, generation=2), strict=True):
        worker.enter(communicator)
    both = torch.stack([worker.weights() for worker in survivors]).mean(0)
    for worker in survivors:
        worker.optimizer.param_groups[0]["lr"] = 0.0
    train_all(survivors, 1, Shares.even(2))
    for worker in survivors:
        torch.testing.assert_close(worker.weights(), both)


@pytest.mark.parametrize("select", ["all", "shift_one"])
def test_what_was_given_up_may_go_on_writing(select: str) -> None:
    main = world(2)
    lonely = Worker(main[0], Decentralized(peer_selection=select))
    before = lonely.weights()
    lonely.model(torch.ones(2, 6))
    lonely.engine.failed = CollectiveFailed("rank 1 is gone")
    assert not lonely.end_step()
    exchange = lonely.exchange
    assert isinstance(exchange, DecentralizedExchange)
    kept = (*exchange._weights.flats, *exchange._incoming)
    torch._foreach_zero_(kept)
    later = Worker(main[1], Decentralized(peer_selection=select))
    later.set_weights(torch.full_like(before, 1e6))
    later.model(torch.ones(2, 6))  # now the operations of the step before complete
    assert not any(flat.any() for flat in kept)
    assert torch.equal(lonely.weights(), before)


def test_a_step_whose_vote_fails_changes_nothing_although_all_weights_arrived() -> None:
    members = workers(2, Decentralized())

    def act(worker: Worker) -> None:
        worker.set_weights(worker.weights() + worker.rank)
        before = worker.weights()
        output = worker.model(torch.ones(2, 6))
        if worker.rank == 1:
            worker.exchange.before_vote()
            main = worker.engine.communicator()
            assert isinstance(main, InProcessCommunicator)
            main.lose("10.0.0.9")
            worker.engine.failed = CollectiveFailed("lost at the vote")
        loss_is = output.sum()
        loss_is.backward()
        worker.optimizer.step()
        assert worker.engine.step_failed
        assert torch.equal(worker.weights(), before)

    run_ranks(members, act)


def test_weights_that_are_shared_in_forward_only_are_not_taken_over() -> None:
    """A step that commits without a backward of this model: nothing of it counts, and the next one is in order."""
    members = workers(2, Decentralized())

    def act(worker: Worker) -> None:
        worker.set_weights(worker.weights() + worker.rank)
        before = worker.weights()
        worker.model(torch.ones(2, 6))
        assert worker.end_step()
        assert torch.equal(worker.weights(), before)
        with worker.model.no_sync():
            worker.model(torch.ones(2, 6)).sum().backward()
        assert worker.end_step()
        assert torch.equal(worker.weights(), before)
        worker.optimizer.param_groups[0]["lr"] = 0.0
        assert worker.train(Shares.even(2))
        torch.testing.assert_close(worker.weights(), before - worker.rank + 0.5)

    run_ranks(members, act)


def test_a_second_forward_in_a_step_exchanges_nothing() -> None:
    members = workers(2, Decentralized())

    def act(worker: Worker) -> None:
        assert worker.train(Shares.even(2))
        changes = worker.engine.parameter_changes
        worker.model(torch.ones(2, 6))
        worker.model(torch.ones(2, 6)).sum().backward()
        assert worker.engine.parameter_changes == changes + 1
        worker.end_step()

    run_ranks(members, act)


def test_replicas_end_equal() -> None:
    members = workers(3, Decentralized(peer_selection="shift_one"))
    train_all(members, 2, Shares.even(3))

    def act(worker: Worker) -> torch.Tensor:
        communicator = worker.engine.communicator()
        assert communicator is not None

        def average(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.clone()
            communicator.allreduce(result).wait()
            return result / 3

        worker.model.finish(average)
        return worker.weights()

    mean = torch.stack([worker.weights() for worker in members]).mean(0)
    ends = run_ranks(members, act)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    torch.testing.assert_close(ends[0], mean)


def test_parameters_that_no_worker_uses_keep_no_gradient_if_asked_for() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.used(x)
            return y

    def act(communicator: Communicator) -> None:
        engine, inner = FakeEngine(communicator), Spare()
        model = DistributedDataParallel(
            inner, None, algorithm="decentralized", find_unused_parameters=True, engine=engine
        )
        model(torch.ones(2, 6)).sum().backward()
        assert inner.spare.weight.grad is None and inner.used.weight.grad is not None

    run_ranks(world(2), act)


def test_complex_and_strided_weights_travel() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.turned = nn.Parameter(torch.randn(6, 3).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = (x @ self.turned.t()) * self.phase.abs()
            return y

    members = workers(2, Decentralized(), build=Odd)

    def act(worker: Worker) -> None:
        with torch.no_grad():
            worker.inner.phase.add_(complex(0, worker.rank))  # type: ignore[operator]
        worker.optimizer.param_groups[0]["lr"] = 0.0
        assert worker.train(Shares.even(2))

    start = members[0].inner.phase.detach().clone()  # type: ignore[operator]
    run_ranks(members, act)
    for worker in members:
        torch.testing.assert_close(worker.inner.phase.detach(), start + 0.5j)  # type: ignore[operator]
