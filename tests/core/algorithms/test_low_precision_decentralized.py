"""The ring follows its formulas bit for bit, and every failure leaves neighbours that agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_core.algorithms import LowPrecisionDecentralized, find_algorithm
from bagua_core.algorithms.low_precision_decentralized import RingExchange
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Lane
from bagua_core.kernels import minmax_compress, minmax_decompress
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

Nodes = tuple[tuple[int, ...], ...]


class Ring:
    """The algorithm in one process, one W a party; L and R are the neighbours' W."""

    def __init__(self, replicas: list[Replica], nodes: Nodes = ()) -> None:
        self.replicas = replicas
        self.parties = nodes if any(len(n) > 1 for n in nodes) else tuple((r,) for r in range(len(replicas)))
        self.public: list[torch.Tensor] = []

    def exchange(self) -> None:
        count = len(self.parties)
        models = []
        for ranks in self.parties:
            total = self.replicas[ranks[0]].weights()
            for r in ranks[1:]:
                total += self.replicas[r].weights()
            models.append(total / len(ranks))
        if not self.public:
            self.public = [x.clone() for x in models]
            return
        before = [w.clone() for w in self.public]
        for i, (x, own) in enumerate(zip(models, self.public, strict=True)):
            if count == 1:
                own.copy_(x)
                continue
            t = x.add(before[i - 1], alpha=1 / 3).add(before[(i + 1) % count], alpha=1 / 3)
            minmax_decompress(minmax_compress(t.add(before[i], alpha=-5 / 3)), own, add=True)
        for ranks, own in zip(self.parties, self.public, strict=True):
            for r in ranks:
                self.replicas[r].set_weights(own)

    def run(
        self, steps: range, shares: Shares, interval: int = 1, silent: frozenset[int] = frozenset()
    ) -> list[list[torch.Tensor]]:
        """The weights that each rank's forwards see. silent: steps that exchange nothing."""
        seen: list[list[torch.Tensor]] = [[] for _ in self.replicas]
        for step in steps:
            if step not in silent and (not self.public or (step - 1) % interval == 0):
                self.exchange()
            for replica, weights in zip(self.replicas, seen, strict=True):
                weights.append(replica.weights())
                replica.learn(step, shares)
                replica.step()
        return seen


def one_a_micro_batch(seen: list[torch.Tensor], parts: int) -> list[torch.Tensor]:
    return seen[::parts]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for step, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"in step {step}: {(a - b).abs().max()}"


def test_it_is_found_by_name_and_refuses_what_it_cannot_do() -> None:
    found = find_algorithm("low_precision_decentralized")
    assert isinstance(found, LowPrecisionDecentralized)
    assert not found.equal_states and found.lanes == {Lane.NODE, Lane.LEADERS}
    assert LowPrecisionDecentralized(False, 3).described == "low_precision_decentralized(False, every 3)"
    with pytest.raises(ValueError, match="communication_interval=-1"):
        LowPrecisionDecentralized(communication_interval=-1)
    with pytest.raises(ValueError, match=r"shape \(2, 4\) is torch.float64. Convert the model to float32"):
        DistributedDataParallel(nn.Linear(4, 2).double(), None, algorithm=found, engine=FakeEngine())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_formulas(size: int, optimizer: MakeOptimizer, parts: int) -> None:
    steps, shares = 7, Shares.uneven(size, parts)
    members = workers(size, LowPrecisionDecentralized(), optimizer)
    train_all(members, steps, shares)
    if size == 1:
        expected = [Ring([Replica(0, optimizer)]).run(range(steps), shares, interval=steps)[0]]
    else:
        expected = Ring([Replica(r, optimizer) for r in range(size)]).run(range(steps), shares)
    for worker, seen in zip(members, expected, strict=True):
        assert_same(one_a_micro_batch(worker.seen, parts), seen)


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3, 4)), ((0, 1), (2,), (3, 4)), ((0, 1, 2, 3, 4),)])
def test_nodes_in_a_ring(nodes: Nodes) -> None:
    steps, shares = 6, Shares.uneven(5)
    members = workers(5, LowPrecisionDecentralized(), nodes=nodes)
    train_all(members, steps, shares)
    expected = Ring([Replica(r) for r in range(5)], nodes).run(range(steps), shares)
    for worker, seen in zip(members, expected, strict=True):
        assert_same(worker.seen, seen)


def test_an_interval() -> None:
    members = workers(3, LowPrecisionDecentralized(communication_interval=3))
    train_all(members, 8, Shares.even(3))
    expected = Ring([Replica(r) for r in range(3)]).run(range(8), Shares.even(3), interval=3)
    for worker, seen in zip(members, expected, strict=True):
        assert_same(worker.seen, seen)


def still(worker: Worker) -> None:
    for name in ("lr", "momentum"):
        worker.optimizer.param_groups[0][name] = 0.0
    worker.optimizer.param_groups[0]["nesterov"] = False


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_models_that_learn_nothing_meet_at_their_mean(size: int) -> None:
    members = workers(size, LowPrecisionDecentralized())
    for worker in members:
        still(worker)
        worker.set_weights(worker.weights() + worker.rank)
    mean = torch.stack([worker.weights() for worker in members]).mean(0)
    train_all(members, 60, Shares.even(size))
    for worker in members:
        torch.testing.assert_close(worker.weights(), mean, rtol=0, atol=0.03)
        torch.testing.assert_close(worker.weights(), members[0].weights(), rtol=0, atol=1e-4)


def test_neighbours_hold_the_same_bits() -> None:
    members = workers(4, LowPrecisionDecentralized())
    train_all(members, 9, Shares.uneven(4))
    rings = [ring_of(worker) for worker in members]
    for i, ring in enumerate(rings):
        for own, of_right in zip(ring.own, rings[i - 1].right, strict=True):
            assert torch.equal(own, of_right)
        for own, of_left in zip(ring.own, rings[(i + 1) % 4].left, strict=True):
            assert torch.equal(own, of_left)


def ring_of(worker: Worker):  # type: ignore[no-untyped-def]
    exchange = worker.exchange
    assert isinstance(exchange, RingExchange)
    return exchange._ring


def test_half_precision_over_real_connections() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 5)
            self.norm = nn.BatchNorm1d(5)
            self.last = nn.Linear(5, 3).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(self.norm(self.first(x)).to(torch.bfloat16)).float()
            return y

    main: list[Communicator] = list(gloo_world(3))
    members = [Worker(c, LowPrecisionDecentralized(), adam, Mixed) for c in main]

    def act(worker: Worker) -> None:
        for step in range(30):
            if step == 8:
                worker.optimizer.param_groups[0]["lr"] = 0.0
            assert worker.train(Shares.uneven(3))

    run_ranks(members, act)
    for worker in members[1:]:
        torch.testing.assert_close(worker.weights(), members[0].weights(), rtol=0, atol=0.02)
        assert worker.weights().isfinite().all()
    for communicator in main:
        communicator.close()


def test_a_new_generation_publishes_and_loses_nothing() -> None:
    """From three to four, the fourth with a copy of rank 0's model, to two: W begins anew, x goes on."""
    members = workers(3, LowPrecisionDecentralized())
    train_all(members, 4, Shares.even(3))
    newcomer = Worker(None, LowPrecisionDecentralized())
    newcomer.heal_from(members[0])
    for generation, who, ranks in ((2, [*members, newcomer], 4), (3, [newcomer, members[2]], 2)):
        for worker, communicator in zip(who, world(ranks, generation=generation), strict=True):
            worker.enter(communicator)
        first = who[0].engine.step
        ring = Ring([Replica(w.rank, like=w) for w in who])
        expected = ring.run(range(first, first + 4), Shares.uneven(ranks))
        before = [worker.weights() for worker in who]
        train_all(who, 4, Shares.uneven(ranks))
        for worker, weights, seen in zip(who, before, expected, strict=True):
            assert torch.equal(weights, worker.seen[-4]), "publishing leaves x as it is"
            assert_same(worker.seen[-4:], seen)


def test_newcomers_are_in_the_ring_from_their_second_step_on() -> None:
    members = workers(3, LowPrecisionDecentralized())
    for worker in members:
        worker.engine.healing = frozenset({2})
    start = [worker.weights() for worker in members]
    shares = Shares(((0.5,), (0.5,), (0.0,)))
    run_ranks(members, lambda worker: worker.train(shares))
    for worker, weights in zip(members, start, strict=True):
        assert torch.equal(worker.seen[0], weights)
        assert worker.engine.parameter_changes == 0, "a copy of it may be under way"
        worker.engine.healing = frozenset()
    ring = Ring([Replica(r, like=members[r]) for r in range(3)])
    expected = ring.run(range(1, 5), Shares.even(3))
    train_all(members, 4, Shares.even(3))
    for worker, seen in zip(members, expected, strict=True):
        assert_same(worker.seen[1:], seen)
        assert worker.engine.parameter_changes > 0


@pytest.mark.parametrize("nodes", [(), ((0, 1), (2,)), ((0,), (1, 2))])
@pytest.mark.parametrize("by", [0, 1, 2])
def test_a_loss_at_any_point(nodes: Nodes, by: int) -> None:
    """Three steps, of which the first publishes; one rank and with it the world is lost at its operation `at`."""
    shares, at = Shares.even(3), 0
    while True:
        main, started = lossy_world(3, at, by, nodes)
        members = [Worker(c, LowPrecisionDecentralized()) for c in main]

        def act(worker: Worker) -> tuple[bool, torch.Tensor, torch.Tensor]:
            for _ in range(3):
                before = worker.weights()
                if not worker.train(shares):
                    return False, before, worker.weights()
            return True, before, before

        results = run_ranks(members, act)
        if all(happened for happened, _, _ in results):
            break
        assert len(started) > at, "the fault happened"
        for _, before, after in results:
            assert torch.equal(before, after), "a step that failed did not happen"
        _go_on_with_two([members[r] for r in range(3) if r != by])
        at += 1
    assert at == len(started) >= 8, "every operation was lost once"


def _go_on_with_two(survivors: list[Worker]) -> None:
    steps = [worker.engine.step for worker in survivors]
    assert max(steps) - min(steps) <= 1
    holder = survivors[steps.index(max(steps))]
    for worker in survivors:
        if worker.engine.step < max(steps):
            worker.heal_from(holder)
    for worker, communicator in zip(survivors, world(2, generation=2), strict=True):
        worker.enter(communicator)
    first = holder.engine.step
    ring = Ring([Replica(w.rank, like=w) for w in survivors])
    expected = ring.run(range(first, first + 3), Shares.even(2))
    train_all(survivors, 3, Shares.even(2))
    for worker, seen in zip(survivors, expected, strict=True):
        assert_same(worker.seen[-3:], seen)


def test_a_step_that_fails_after_its_exchange_puts_the_weights_back() -> None:
    members = workers(2, LowPrecisionDecentralized())
    train_all(members, 2, Shares.even(2))

    def act(worker: Worker) -> None:
        before = worker.weights()
        output = worker.model(torch.ones(2, 6))
        assert not torch.equal(worker.weights(), before), "the forward runs on the new weights"
        main = worker.engine.communicator()
        assert isinstance(main, InProcessCommunicator)
        main.lose("10.0.0.9")
        output.sum().backward()
        worker.optimizer.step()
        assert isinstance(worker.engine.failed, CollectiveFailed)
        assert not worker.end_step()
        assert torch.equal(worker.weights(), before)

    run_ranks(members, act)


def test_a_worker_that_alone_misses_the_vote_puts_back_and_heals() -> None:
    """The exchange came to its end on both, the vote on rank 0 only: what counts is what rank 0 has."""
    members = workers(2, LowPrecisionDecentralized())
    train_all(members, 2, Shares.even(2))
    late = members[1]

    def is_missed(pair: object) -> None:
        late.engine.reduction_failed(CollectiveFailed("lost at the vote"))

    late.engine.reduction_done = is_missed  # type: ignore[method-assign]
    before = late.weights()
    assert run_ranks(members, lambda worker: worker.train(Shares.even(2))) == [True, False]
    assert torch.equal(late.weights(), before)
    del late.engine.reduction_done
    _go_on_with_two(members)


def test_a_later_part_that_fails_takes_nothing_of_the_first_back() -> None:
    """The step's first reduction is in and its optimizer has stepped; a second model's reduction fails."""
    members = workers(2, LowPrecisionDecentralized())
    train_all(members, 2, Shares.even(2))

    def act(worker: Worker) -> None:
        worker.optimizer.zero_grad()
        worker.model(torch.ones(2, 6)).sum().backward()
        worker.optimizer.step()
        after = worker.weights()
        worker.engine.failed = CollectiveFailed("another model's reduction")
        assert not worker.end_step()
        assert torch.equal(worker.weights(), after)

    run_ranks(members, act)


def test_messages_that_were_given_up_may_go_on_arriving() -> None:
    main = world(2)
    lonely = Worker(main[0], LowPrecisionDecentralized())
    lost: list[CollectiveFailed] = []

    def gives_up(pending: object) -> None:
        lost.append(CollectiveFailed("rank 1 is gone"))
        raise lost[-1]

    lonely.engine.wait = gives_up  # type: ignore[method-assign,assignment]
    lonely.model(torch.ones(2, 6))
    assert lost and lonely.engine.failed is lost[0]
    assert not lonely.end_step()
    ring = ring_of(lonely)
    later = Worker(main[1], LowPrecisionDecentralized())
    later.model(torch.ones(2, 6))  # now the messages of the step before arrive
    assert not any(message.any() for message in (*ring.from_left, *ring.from_right))


def test_a_step_without_backward_commits_its_exchange() -> None:
    members = workers(2, LowPrecisionDecentralized())
    for worker in members:
        worker.set_weights(worker.weights() + worker.rank)

    def act(worker: Worker) -> None:
        for _ in range(30):
            worker.model(torch.ones(2, 6))
            assert worker.end_step()

    run_ranks(members, act)
    torch.testing.assert_close(members[0].weights(), members[1].weights(), rtol=0, atol=1e-3)
