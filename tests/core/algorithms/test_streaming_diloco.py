"""Fragments follow the formulas, steps go on beside an exchange, and what failed or was dropped leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from bagua_core.algorithms import LocalSGD, StreamingDiLoCo, find_algorithm
from bagua_core.algorithms.streaming_diloco import StreamingExchange
from bagua_core.communication.communicator import Communicator, Lane, Pending
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.balancing.balanced_division import BalancedDivision
from bagua_core.data.division import DivisionSettings
from bagua_core.data.prefetch import BatchKey
from bagua_core.parallel import DistributedDataParallel
from tests.core.algorithms.plain_diloco import PlainDiLoCo
from tests.core.algorithms.weight_workers import MakeOptimizer, Replica, Shares, Worker, adam, sgd, train_all
from tests.core.communication.worlds import DEADLINE_S, FakeEngine, gloo_world, in_process_world, run_ranks

# Fragment 1 is sent in the steps 2, 6, 10, fragment 0 in 4, 8, 12; each is applied in the step after.
STREAM = StreamingDiLoCo(sync_every=4, fragments=2, delay=1, alpha=0.25, outer_momentum=0.8)
WHOLE = StreamingDiLoCo(sync_every=3, fragments=1, delay=0, alpha=0.0)
# Exchanges of several fragments are under way at once.
LATE = StreamingDiLoCo(sync_every=4, fragments=3, delay=3, alpha=0.5)
BY_SAMPLES = StreamingDiLoCo(sync_every=4, fragments=2, delay=1, weighted_by="samples")
UINT8 = StreamingDiLoCo(sync_every=4, fragments=2, delay=1, compress="uint8")
INT4 = StreamingDiLoCo(sync_every=4, fragments=2, delay=1, compress="int4", weighted_by="samples")


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def world(size: int, generation: int = 1) -> list[Communicator]:
    main, beside = in_process_world(size, generation), in_process_world(size, generation)
    for communicator, lane in zip(main, beside, strict=True):
        communicator.lanes = {Lane.BACKGROUND: lane}
    return main


def workers(size: int, algorithm: StreamingDiLoCo, optimizer: MakeOptimizer = sgd) -> list[Worker]:
    return [Worker(c, algorithm, optimizer) for c in world(size)]


def exchange_of(worker: Worker) -> StreamingExchange:
    assert isinstance(worker.exchange, StreamingExchange)
    return worker.exchange


def under_way(worker: Worker) -> list[int]:
    return [f.number for f in exchange_of(worker)._fragments if f.flight is not None]


def test_it_is_found_by_name_and_refuses_what_it_cannot_do() -> None:
    found = find_algorithm("streaming_diloco")
    assert isinstance(found, StreamingDiLoCo) and not found.equal_states
    assert found.lanes == {Lane.BACKGROUND}
    assert STREAM.described == (
        "streaming_diloco(every 4, 2 fragments, delay 1, alpha 0.25, nesterov 0.7 0.8, none, by workers)"
    )
    for arguments, text in [
        ({"sync_every": 0}, "sync_every=0; use 1 or more"),
        ({"fragments": 0}, "fragments=0; use 1 or more"),
        ({"sync_every": 4, "delay": 4}, "delay=4; use 0 to 3 steps"),
        ({"delay": -1}, "delay=-1; use 0 to 99"),
        ({"alpha": 1.0}, "alpha=1.0 must be at least 0 and below 1"),
        ({"alpha": float("nan")}, "alpha=nan must be"),
        ({"outer_lr": 0.0}, "outer_lr=0.0 must be positive"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 must be"),
        ({"compress": "int2"}, "'int2' is unknown; use one of none, uint8, int4"),
        ({"weighted_by": "tokens"}, '\'tokens\' is unknown; use "workers" or "samples"'),
    ]:
        with pytest.raises(ValueError, match=text):
            StreamingDiLoCo(**arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"streaming_diloco\(compress='int4'\) compresses weights of 32 or 16 bits"
    ):
        DistributedDataParallel(nn.Linear(4, 2).double(), None, algorithm=INT4, engine=FakeEngine())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    "algorithm", [STREAM, WHOLE, LATE, BY_SAMPLES, UINT8, INT4], ids=lambda a: a.described
)
def test_arithmetic(size: int, optimizer: MakeOptimizer, algorithm: StreamingDiLoCo) -> None:
    shares = Shares.uneven(size, 2)
    members = workers(size, algorithm, optimizer)
    plain = PlainDiLoCo([Replica(r, optimizer) for r in range(size)], algorithm)
    for steps in (range(0, 3), range(3, 6), range(6, 14)):
        train_all(members, len(steps), shares)
        plain.run(steps, shares)
        plain.check(members)
    assert all(exchange_of(worker).rounds >= 3 for worker in members)


def test_muon_as_the_inner_optimizer() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))

    def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.02)

    shares = Shares.even(2)
    members = [Worker(c, STREAM, muon, build) for c in world(2)]
    plain = PlainDiLoCo([Replica(r, muon, build=build) for r in range(2)], STREAM)
    train_all(members, 9, shares)
    plain.run(range(9), shares)
    plain.check(members, 1e-4)  # Muon computes in bfloat16


def test_one_fragment_without_delay_is_local_sgd_with_an_outer_optimizer() -> None:
    members = workers(3, WHOLE)
    others = [Worker(c, LocalSGD(3, "nesterov")) for c in world(3)]
    for some in (members, others):
        train_all(some, 8, Shares.uneven(3))
    for one, other in zip(members, others, strict=True):
        torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-4, atol=1e-5)


class Held:
    """Holds the collectives `name` that a communicator starts from now on."""

    def __init__(self, communicator: Communicator, name: str = "allgather") -> None:
        self.started, self.goes_on = threading.Event(), threading.Event()
        start: Callable[..., Pending] = getattr(communicator, name)

        def held(*arguments: Any) -> Pending:
            self.started.set()
            assert self.goes_on.wait(DEADLINE_S)
            return start(*arguments)

        setattr(communicator, name, held)


def lane_of(worker: Worker) -> Communicator:
    communicator = worker.engine.communicator()
    assert communicator is not None
    return communicator.lanes[Lane.BACKGROUND]


def test_steps_go_on_beside_an_exchange_until_it_is_due() -> None:
    algorithm = StreamingDiLoCo(sync_every=4, fragments=1, delay=3)
    members, shares = workers(2, algorithm), Shares.even(2)
    train_all(members, 4, shares)
    held = Held(lane_of(members[1]))
    train_all(members, 3, shares)  # the exchange is sent in the first of these steps
    assert held.started.wait(DEADLINE_S)
    flights = [exchange_of(worker)._fragments[0].flight for worker in members]
    assert all(flight is not None and not flight.pending.is_done() for flight in flights)
    held.goes_on.set()
    train_all(members, 1, shares)
    assert [exchange_of(worker).rounds for worker in members] == [1, 1]
    plain = PlainDiLoCo([Replica(r) for r in range(2)], algorithm)
    plain.run(range(8), shares)
    plain.check(members)


def test_a_worker_without_samples_in_the_round_counts_nothing() -> None:
    members, shares = workers(2, WHOLE), Shares(((1.0,), (0.0,)))
    train_all(members, 3, shares)
    members[1].set_weights(members[1].weights() + 100.0)
    own = members[0].weights()
    anchor = members[0].model.travelling()["anchor.0.0"].clone()
    train_all(members, 1, shares)
    moved = 0.7 * 1.9 * (own - anchor)  # the momentum was zero
    torch.testing.assert_close(members[0].model.travelling()["anchor.0.0"], anchor + moved)
    assert torch.equal(members[0].seen[3], members[1].seen[3])


@pytest.mark.parametrize("mean_over", ["complexity", "samples"])
def test_workers_count_by_tokens_where_the_loss_is_a_mean_over_tokens(
    mean_over: Literal["samples", "complexity"],
) -> None:
    """In each batch one worker has samples of eight and of one token, the other one four samples of one token."""
    lengths = [8.0, 1.0, 1.0, 1.0, 1.0, 1.0] * 3
    division = BalancedDivision(
        lengths,
        Balance(complexities=lengths, mean_over=mean_over),
        DivisionSettings(0, False, False, 6, None),
    )
    algorithm = StreamingDiLoCo(sync_every=3, fragments=1, delay=0, alpha=0.0, weighted_by="samples")
    members = workers(2, algorithm)
    for batch in range(3):
        pieces = [division.piece(BatchKey(rank, 2, 0, batch, 0)) for rank in range(2)]
        assert sorted(len(piece.indices) for piece in pieces) == [2, 4]
        train_all(members, 1, Shares(tuple((piece.weight,) for piece in pieces)))
    has_long = [any(lengths[i] == 8.0 for i in piece.indices) for piece in pieces]
    anchor = members[0].model.travelling()["anchor.0.0"].clone()
    long, short = (members[has_long.index(found)].weights() - anchor for found in (True, False))
    train_all(members, 1, Shares.even(2))
    part = 9 / 13 if mean_over == "complexity" else 2 / 6
    moved = 0.7 * 1.9 * (part * long + (1 - part) * short)  # the momentum was zero
    torch.testing.assert_close(members[0].model.travelling()["anchor.0.0"], anchor + moved)


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
    for communicator, lane in zip(main, gloo_world(3), strict=True):
        communicator.lanes = {Lane.BACKGROUND: lane}
    members = [Worker(c, STREAM, adam, Mixed) for c in main]
    train_all(members, 12, Shares.uneven(3))
    first = members[0].model.travelling()
    kinds = {tensor.dtype for name, tensor in first.items() if name.startswith("anchor")}
    assert kinds == {torch.float64, torch.float32}, "half precision has an anchor of more"
    for worker in members:
        assert exchange_of(worker).rounds >= 4
        assert all(torch.equal(t, first[name]) for name, t in worker.model.travelling().items())
        assert worker.weights().isfinite().all()
        exchange_of(worker).close()
    for communicator in main:
        communicator.close()


def test_what_travels_is_always_the_same_memory() -> None:
    members = workers(2, STREAM)
    before = {name: t.data_ptr() for name, t in members[0].model.travelling().items()}
    assert set(before) == {"clocks", "anchor.0.0", "anchor.1.0", "momentum.0.0", "momentum.1.0"}
    train_all(members, 7, Shares.even(2))
    members[0].enter(None)
    assert before == {name: t.data_ptr() for name, t in members[0].model.travelling().items()}


def test_a_model_that_is_loaded_after_it_was_wrapped_is_the_first_anchor() -> None:
    members = workers(2, STREAM)
    for worker in members:
        worker.set_weights(worker.weights() + 5.0)
    plain = PlainDiLoCo([Replica(r, like=members[r]) for r in range(2)], STREAM)
    train_all(members, 6, Shares.even(2))
    plain.run(range(6), Shares.even(2))
    plain.check(members)


def test_replicas_end_equal_and_an_exchange_under_way_is_dropped() -> None:
    members = workers(2, STREAM)
    train_all(members, 3, Shares.even(2))
    assert under_way(members[0]) == [1]
    mean = torch.stack([worker.weights() for worker in members]).mean(0)

    def act(worker: Worker) -> torch.Tensor:
        communicator = worker.engine.communicator()
        assert communicator is not None

        def average(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.clone()
            communicator.allreduce(result).wait()
            return result / 2

        worker.model.finish(average)
        return worker.weights()

    ends = run_ranks(members, act)
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], mean)
    assert under_way(members[0]) == [] and exchange_of(members[0]).dropped == 0
