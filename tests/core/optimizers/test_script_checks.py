"""Scripts whose optimizers would use gradients that are not the job's are stopped, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_core.algorithms import LocalSGD
from bagua_core.communication.communicator import Communicator
from bagua_core.elastic.step.engine import Engine
from bagua_core.optimizers.script_checks import NotReducedError, SharedParametersError, UngatedOptimizerError
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.encoder(x)))
        return y


class Worker:
    def __init__(self, communicator: Communicator | None, algorithm: str = "gradient_allreduce") -> None:
        self.engine = FakeEngine(communicator)
        self.rank = communicator.global_rank if communicator else 0
        self.net = seeded(Net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.model = DistributedDataParallel(self.net, [self.optimizer], algorithm, engine=self.engine)

    @property
    def x(self) -> torch.Tensor:
        return torch.full((2, 4), 1.0 + self.rank)

    def loss(self) -> torch.Tensor:
        return self.model(self.x).square().sum()

    def end_step(self) -> None:
        assert not self.engine.step_failed
        self.model.step_committed()
        self.engine.step += 1

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.net.parameters()])


def on_two(act: Callable[[Worker], None], algorithm: str = "gradient_allreduce") -> list[Worker]:
    members = [Worker(c, algorithm) for c in in_process_world(2)]
    run_ranks(members, act)
    return members


def stays_put(worker: Worker, step: Callable[[], object], text: str) -> None:
    before = worker.weights()
    with pytest.raises(NotReducedError, match=text):
        step()
    assert torch.equal(worker.weights(), before)


# -- gradients that were not reduced


def test_gradients_of_autograd_grad_are_refused() -> None:
    def act(w: Worker) -> None:
        for _ in range(2):  # also after a step that was right
            gradients = torch.autograd.grad(w.loss(), list(w.net.parameters()))
            for p, g in zip(w.net.parameters(), gradients, strict=True):
                p.grad = g
            stays_put(w, w.optimizer.step, r"SGD .*no backward of the model ran in this step: encoder.weight")
            w.optimizer.zero_grad()
            w.loss().backward()
            w.optimizer.step()
            w.end_step()
            w.optimizer.zero_grad()

    first, second = on_two(act)
    assert torch.equal(first.weights(), second.weights())


def test_a_step_inside_backward_is_refused() -> None:
    def act(w: Worker) -> None:
        w.net.encoder.bias.register_post_accumulate_grad_hook(lambda _: w.optimizer.step())
        stays_put(w, lambda: w.loss().backward(), r"backward of the model is still under way: .*head.weight")

    on_two(act)


def test_optimizers_for_each_parameter_inside_backward_are_refused() -> None:
    nets = [seeded(Net) for _ in range(2)]

    def act(communicator: Communicator) -> None:
        net = nets[communicator.global_rank]
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
        model = DistributedDataParallel(net, list(optimizers.values()), engine=FakeEngine(communicator))
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        with pytest.raises(NotReducedError, match=r"still under way: head\.(bias|weight)"):
            model(torch.ones(1, 4)).sum().backward()

    run_ranks(in_process_world(2), act)


def test_gradients_under_no_sync_are_refused_until_they_are_reduced() -> None:
    def act(w: Worker) -> None:
        w.loss().backward()
        with w.model.no_sync():
            w.loss().backward()
        stays_put(w, w.optimizer.step, r"no_sync\(\) was followed by none outside it: encoder.weight")
        w.loss().backward()
        w.optimizer.step()

    first, second = on_two(act)
    assert torch.equal(first.weights(), second.weights())


def test_replicas_that_train_on_their_own_gradients_may_use_them() -> None:
    def act(w: Worker) -> None:
        with w.model.no_sync():
            w.loss().backward()
        w.optimizer.step()

    on_two(act, "local_sgd")


# -- what scripts may do with reduced gradients


def test_gradients_may_be_replaced_after_their_reduction() -> None:
    def act(w: Worker) -> None:
        w.loss().backward()
        for p in w.net.parameters():
            assert p.grad is not None
            p.grad = p.grad.clamp(-0.1, 0.1)
        w.optimizer.step()

    first, second = on_two(act)
    assert torch.equal(first.weights(), second.weights())


def test_an_optimizer_of_two_models_may_step_when_one_of_them_took_part() -> None:
    nets = [(seeded(Net), seeded(Net, 1)) for _ in range(2)]

    def act(communicator: Communicator) -> torch.Tensor:
        engine, (a, b) = FakeEngine(communicator), nets[communicator.global_rank]
        optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
        models = [DistributedDataParallel(net, [optimizer], engine=engine) for net in (a, b)]
        for number in range(4):
            # the other model keeps the reduced gradient of the step before
            models[number % 2](torch.full((1, 4), 1.0 + communicator.global_rank)).sum().backward()
            optimizer.step()
            for model in models:
                model.step_committed()
            engine.step += 1
        return torch.cat([p.detach().reshape(-1) for p in (*a.parameters(), *b.parameters())])

    first, second = run_ranks(in_process_world(2), act)
    assert torch.equal(first, second)


def test_a_world_of_one_may_assign_gradients() -> None:
    worker = Worker(None)
    for p in worker.net.parameters():
        p.grad = torch.ones_like(p)
    worker.optimizer.step()


# -- parameters that no model reduces


def test_a_parameter_of_no_wrapped_model_is_named() -> None:
    def act(w: Worker) -> None:
        extra = nn.Linear(2, 1)
        w.optimizer.add_param_group({"params": extra.parameters()})
        extra(w.model(w.x)).sum().backward()
        stays_put(
            w,
            w.optimizer.step,
            r"no wrapped model reduces.*param_groups\[1\]\['params'\]\[0\] of shape \(1, 2\)",
        )

    on_two(act)


def test_a_module_added_after_wrapping_is_named() -> None:
    def act(w: Worker) -> None:
        w.loss().backward()
        w.optimizer.step()
        w.net.tail = nn.Linear(2, 1)
        w.optimizer.add_param_group({"params": w.net.tail.parameters()})
        w.net.tail(w.model(w.x)).sum().backward()
        stays_put(w, w.optimizer.step, r"no wrapped model reduces.*tail.weight, tail.bias")

    on_two(act)


def test_parameters_without_a_gradient_may_be_in_no_model() -> None:
    def act(w: Worker) -> None:
        w.optimizer.add_param_group({"params": nn.Linear(2, 1).parameters()})
        w.loss().backward()
        w.optimizer.step()

    on_two(act)


# -- models that share parameters


def test_two_models_that_share_an_encoder_are_refused() -> None:
    engine, first, second = FakeEngine(), seeded(Net), seeded(Net)
    second.encoder = first.encoder
    DistributedDataParallel(first, None, engine=engine)
    with pytest.raises(SharedParametersError, match=r"encoder.weight, encoder.bias: another wrapped model"):
        DistributedDataParallel(second, None, engine=engine)


def test_a_model_that_could_not_be_wrapped_is_no_other_model() -> None:
    engine, net = FakeEngine(), seeded(Net).double()
    with pytest.raises(ValueError, match="compresses weights") as kept:
        DistributedDataParallel(net, None, LocalSGD(compress="uint8"), engine=engine)
    DistributedDataParallel(net, None, engine=engine)
    assert kept.traceback, "it holds the model that was given up"


def test_two_models_may_share_what_is_frozen() -> None:
    engine, first, second = FakeEngine(), seeded(Net), seeded(Net)
    second.encoder = first.encoder.requires_grad_(False)
    DistributedDataParallel(first, None, engine=engine)
    DistributedDataParallel(second, None, engine=engine)


# -- optimizers that were passed to no wrapped model


def test_an_optimizer_that_was_not_passed_is_refused() -> None:
    worker = Worker(None)
    other = torch.optim.Adam(worker.net.head.parameters())
    worker.loss().backward()
    before = worker.weights()
    with pytest.raises(UngatedOptimizerError, match=r"this Adam steps on .*head.weight, head.bias"):
        other.step()
    assert torch.equal(worker.weights(), before)
    unrelated = nn.Linear(1, 1)
    elsewhere = torch.optim.Adam(unrelated.parameters())
    unrelated(torch.ones(1, 1)).sum().backward()
    elsewhere.step()


class Around(torch.optim.Optimizer):
    """An optimizer that steps another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_inside_one_that_was_passed_may_step() -> None:
    net = seeded(Net)
    around = Around(torch.optim.SGD(net.parameters(), lr=0.1))
    model = DistributedDataParallel(net, [around], engine=FakeEngine())
    before = net.head.bias.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    around.step()
    assert not torch.equal(net.head.bias, before)


def test_a_step_without_any_gradient_is_not_refused() -> None:
    """Scripts take one before the loop, to quiet the warning of a scheduler."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, None, engine=Engine(None))
    optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UngatedOptimizerError):
        optimizer.step()
