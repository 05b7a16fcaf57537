"""LBFGS and its like: one process's path on any number of workers, and whole steps or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.algorithms import Algorithm, LocalSGD
from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.reduction.earlier_backwards import SecondBackwardError
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.step.engine import Engine
from bagua_core.optimizers.optimizer_gate import gate_optimizer
from bagua_core.optimizers.repeated_closure import RepeatedClosureError
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import FakeEngine, gloo_world, in_process_world, run_ranks, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


class Worker:
    def __init__(
        self,
        communicator: Communicator | None,
        share: tuple[int, int] = (0, 12),
        algorithm: str | Algorithm = "gradient_allreduce",
        kind: type[torch.optim.Optimizer] = torch.optim.LBFGS,
        **options: Any,
    ) -> None:
        self.engine = FakeEngine(communicator, (share[1] - share[0]) / 12)
        self.share = share
        self.net = seeded(net)
        self.optimizer = kind(self.net.parameters(), **options)  # type: ignore[call-arg]
        self.model = DistributedDataParallel(self.net, [self.optimizer], algorithm, engine=self.engine)
        self.calls = 0
        self.at_call: dict[int, Callable[[], object]] = {}

    def closure(self) -> torch.Tensor:
        self.calls += 1
        self.at_call.get(self.calls, lambda: None)()
        self.optimizer.zero_grad()
        begin, end = self.share
        y = self.model(X[begin:end] if end > begin else X[:2] * torch.nan)
        loss = nn.functional.mse_loss(y, Y[begin:end] if end > begin else Y[:2])
        loss.backward()
        return loss

    def step(self) -> Any:
        return self.optimizer.step(self.closure)


def alone(steps: int, **options: Any) -> tuple[torch.Tensor, int]:
    worker = Worker(None, **options)
    for _ in range(steps):
        worker.step()
    return weights_of(worker.net), worker.calls


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
@pytest.mark.parametrize("shares", [[(0, 5), (5, 12)], [(0, 2), (2, 12), (12, 12)]])
@pytest.mark.parametrize("build", [in_process_world, gloo_world])
def test_lbfgs_goes_the_way_of_one_process(
    build: Callable[[int], list[Communicator]], shares: list[tuple[int, int]], line_search: str | None
) -> None:
    options = {"line_search_fn": line_search, "lr": 0.3, "max_iter": 8}
    members = [Worker(c, s, **options) for c, s in zip(build(len(shares)), shares, strict=True)]
    losses = run_ranks(members, lambda w: [float(w.step()) for _ in range(3)])
    expected, calls = alone(3, **options)
    for member, seen in zip(members, losses, strict=True):
        assert member.calls == calls > 12
        assert seen == losses[0]
        assert torch.equal(weights_of(member.net), weights_of(members[0].net))
        torch.testing.assert_close(weights_of(member.net), expected)
        assert member.engine.final_steps == 3


@pytest.mark.parametrize("at", [2, 5])
def test_a_loss_of_a_peer_in_a_later_call_abandons_the_whole_step(at: int) -> None:
    world = build_in_process(2)
    members = [Worker(c, s, max_iter=6) for c, s in zip(world, [(0, 5), (5, 12)], strict=True)]
    run_ranks(members, Worker.step)
    survivor, lost = members
    before, state = weights_of(survivor.net), survivor.optimizer.state_dict()["state"][0]
    prices = {name: state[name] for name in ("func_evals", "n_iter", "t")}
    direction, history = state["d"].clone(), [y.clone() for y in state["old_dirs"]]

    class Gone(Exception):
        pass

    def goes() -> None:
        world[1].lose("10.0.0.9")
        raise Gone

    lost.calls = 0
    lost.at_call = {at: goes}

    def act(w: Worker) -> None:
        if w is lost:
            with pytest.raises(Gone):
                w.step()
        else:
            assert float(w.step()) > 0

    run_ranks(members, act)
    assert survivor.engine.step_failed and survivor.engine.final_steps == 1
    assert torch.equal(weights_of(survivor.net), before)
    after = survivor.optimizer.state_dict()["state"][0]
    assert {name: after[name] for name in prices} == prices
    assert torch.equal(after["d"], direction)
    assert all(torch.equal(a, b) for a, b in zip(after["old_dirs"], history, strict=True))


def test_an_exception_in_a_later_call_undoes_the_step_too() -> None:
    worker = Worker(None, max_iter=6)
    worker.step()
    before, calls = weights_of(worker.net), worker.calls

    def fails() -> None:
        raise ArithmeticError("of the script")

    worker.at_call = {calls + 3: fails}
    with pytest.raises(ArithmeticError):
        worker.step()
    assert torch.equal(weights_of(worker.net), before)
    assert worker.engine.final_steps == 1


def test_the_first_step_that_is_abandoned_leaves_no_state() -> None:
    world = build_in_process(2)
    worker = Worker(world[0])
    assert isinstance(world[1], InProcessCommunicator)
    worker.at_call = {1: lambda: world[1].lose("10.0.0.9")}
    before = weights_of(worker.net)
    worker.step()
    assert worker.engine.step_failed and not worker.optimizer.state
    assert torch.equal(weights_of(worker.net), before)


def test_the_engine_calls_the_part_final_after_the_last_call_only() -> None:
    engine = Engine(None)
    inner = seeded(net)
    optimizer = torch.optim.LBFGS(inner.parameters(), max_iter=4)
    model = DistributedDataParallel(inner, [optimizer], engine=engine)
    finals: list[int] = []

    def closure() -> torch.Tensor:
        finals.append(engine.state.final_parts)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        return loss

    engine.next_step()
    optimizer.step(closure)
    assert len(finals) > 2 and set(finals) == {0}
    assert engine.state.final_parts == 1


def test_a_plain_optimizer_with_a_closure_pays_nothing() -> None:
    members = [Worker(c, s, kind=torch.optim.SGD, lr=0.1) for c, s in zip(
        in_process_world(2), [(0, 5), (5, 12)], strict=True
    )]  # fmt: skip
    sent: list[list[int]] = [[], []]
    for member, numbers in zip(members, sent, strict=True):
        communicator = member.engine.communicator()
        assert communicator is not None
        start = communicator.allreduce
        communicator.allreduce = (  # type: ignore[method-assign]
            lambda tensor, *rest, start=start, numbers=numbers: (
                numbers.append(tensor.numel()),
                start(tensor, *rest),
            )[1]
        )
    own = run_ranks(members, lambda w: float(w.step().detach()))
    assert own[0] != own[1]
    assert all(1 not in numbers for numbers in sent), "no reduction of the loss"


def test_micro_batches_and_repeated_closures_do_not_go_together() -> None:
    worker = Worker(None, max_iter=4)
    worker.engine.current = MicroBatch(0.5, False)
    worker.step()
    worker.engine.current = MicroBatch(0.5, True)
    with pytest.raises(
        RepeatedClosureError, match=r"LBFGS calls its closure several times.*max_local_batch_size"
    ):
        worker.step()


def test_replicas_that_differ_and_repeated_closures_do_not_go_together() -> None:
    members = [Worker(c, algorithm="local_sgd") for c in in_process_world(2)]

    def act(w: Worker) -> None:
        with pytest.raises(RepeatedClosureError, match=r'algorithm="gradient_allreduce"'):
            w.step()

    run_ranks(members, act)


def test_an_optimizer_without_a_model_may_repeat_its_closure() -> None:
    parameter = nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.LBFGS([parameter], line_search_fn="strong_wolfe")
    gate_optimizer(optimizer, FakeEngine(None))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert float(parameter) == pytest.approx(0.0, abs=1e-4)


# -- one call, but after parameters have moved


class SAM(torch.optim.Optimizer):
    """As commonly published: the gradients that are there lead to another place, whose gradients are used here."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"rho": 0.5, "lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad * (0.5 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, state in self.state.items():
            p.copy_(state["before"])
        self.inner.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


def sharpness_aware(worker: Worker, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        worker.engine.final = False
        worker.closure()
        worker.engine.final = True
        losses.append(float(worker.step()))
    return losses


def sharpness_aware_alone(steps: int = 3) -> tuple[torch.Tensor, list[float]]:
    """Without Bagua."""
    model = seeded(net)
    optimizer = SAM(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        closure()
        losses.append(float(optimizer.step(closure)))
    return weights_of(model), losses


@pytest.mark.parametrize("shares", [[(0, 12)], [(0, 5), (5, 12)]])
def test_sam_computes_its_second_gradient_where_it_has_moved_to(shares: list[tuple[int, int]]) -> None:
    world: list[Any] = [None] if len(shares) == 1 else list(in_process_world(len(shares)))
    members = [Worker(c, s, kind=SAM) for c, s in zip(world, shares, strict=True)]
    found = run_ranks(members, sharpness_aware)
    expected, losses = sharpness_aware_alone()
    for member, own in zip(members, found, strict=True):
        torch.testing.assert_close(weights_of(member.net), expected)
        assert own == pytest.approx(losses) and own == found[0]
        assert member.calls == 6 and member.engine.final_steps == 3


def test_so_does_one_whose_first_gradient_is_of_the_closure_too() -> None:
    """The runtime calls the closure before the optimizer, since no reduction of the step came before."""
    members = [Worker(c, s, kind=SAM) for c, s in zip(in_process_world(2), [(0, 5), (5, 12)], strict=True)]
    run_ranks(members, lambda w: [w.step() for _ in range(3)])
    for member in members:
        torch.testing.assert_close(weights_of(member.net), sharpness_aware_alone()[0])


def test_a_loss_of_a_peer_in_its_call_undoes_what_it_moved() -> None:
    world = build_in_process(2)
    worker = Worker(world[0], (0, 5), kind=SAM)
    peer = Worker(world[1], (5, 12), kind=SAM)
    run_ranks([worker, peer], Worker.closure)
    worker.engine.final = True
    before = weights_of(worker.net)
    worker.at_call = {2: lambda: world[1].lose("10.0.0.9")}
    assert float(worker.step()) > 0
    assert worker.engine.step_failed and worker.engine.final_steps == 0
    assert torch.equal(weights_of(worker.net), before) and not worker.optimizer.state


def test_in_a_round_sam_sees_each_workers_own_loss_and_needs_no_other_worker() -> None:
    """Members take different numbers of local steps, and each of these is a whole batch of its worker."""
    shares, steps = [(0, 5), (5, 12)], [3, 2]
    members = [
        Worker(c, s, LocalSGD(sync_every=20, unit="round"), SAM)
        for c, s in zip(in_process_world(2), shares, strict=True)
    ]
    for member in members:
        member.engine.current = MicroBatch(1.0, True)
    found = run_ranks(
        list(zip(members, steps, strict=True)), lambda m: [float(m[0].step()) for _ in range(m[1])]
    )
    for share, count, losses in zip(shares, steps, found, strict=True):
        single = Worker(None, share, kind=SAM)
        single.engine.current = MicroBatch(1.0, True)
        assert losses == [float(single.step()) for _ in range(count)]


def test_sam_and_micro_batches_do_not_go_together() -> None:
    worker = Worker(None, kind=SAM)
    worker.engine.current = MicroBatch(0.5, False)
    worker.step()
    worker.engine.current = MicroBatch(0.5, True)
    with pytest.raises(RepeatedClosureError, match=r"after it has moved parameters.*max_local_batch_size"):
        worker.step()


def test_sam_behind_a_backward_of_the_script_is_refused_in_the_first_micro_batch() -> None:
    worker = Worker(None, kind=SAM)
    worker.engine.current = MicroBatch(0.5, False)
    worker.closure()
    with pytest.raises(SecondBackwardError, match="max_local_batch_size"):
        worker.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, SAM])
def test_a_step_that_failed_before_gives_the_script_its_loss(kind: type[torch.optim.Optimizer]) -> None:
    worker = Worker(in_process_world(2)[0], kind=kind, lr=0.1)
    worker.engine.failed = CollectiveFailed("before the closure")
    before = weights_of(worker.net)
    assert float(worker.step()) > 0
    assert torch.equal(weights_of(worker.net), before)


@pytest.mark.parametrize(("part", "own"), [(1.0, 0.5), (2.0, 1.0), (0.0, 0.0)])
def test_the_loss_of_one_shard_is_not_given_where_a_replica_divides_its_samples(
    part: float, own: float
) -> None:
    """The mean over the workers with one shard lacks the samples of the others."""
    worker = Worker(None, max_iter=1)
    worker.engine.current = MicroBatch(0.5, True, part=part, own=own)
    with pytest.raises(RepeatedClosureError, match=r"LBFGS may call its closure several times.*own samples"):
        worker.step()
    assert worker.calls == 0
