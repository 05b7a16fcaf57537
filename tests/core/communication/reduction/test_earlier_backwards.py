"""A second backward in a micro-batch counts only if the script has not cleared or used the first one's gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bagua_core.communication.reduction.earlier_backwards import SecondBackwardError
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import seeded

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))


class Training:
    """Two models of one process, each with its optimizer, and steps of 16 samples."""

    def __init__(self, limit: int | None) -> None:
        engine = Engine(None)
        plain = [seeded(lambda: nn.Linear(3, 1)), seeded(lambda: nn.Linear(3, 3))]
        self.optimizer, self.other_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in plain)
        self.model = DistributedDataParallel(plain[0], optimizers=[self.optimizer], engine=engine)
        self.other = DistributedDataParallel(plain[1], optimizers=[self.other_optimizer], engine=engine)
        self.loader = ElasticDataLoader(
            TensorDataset(X), 16, max_local_batch_size=limit, shuffle=False, engine=engine
        )


def critic_and_generator(t: Training, x: torch.Tensor, frozen: bool = False) -> None:
    t.model.zero_grad()
    (t.model(x) - 1).square().mean().backward()
    t.model(t.other(x).detach()).square().mean().backward()
    t.optimizer.step()
    t.other.zero_grad()
    t.model.requires_grad_(not frozen)
    (t.model(t.other(x)) - 1).square().mean().backward()
    t.model.requires_grad_(True)
    t.other_optimizer.step()


def generator_and_critic(t: Training, x: torch.Tensor) -> None:
    """The generator's loss leaves gradients in the critic, whose turn begins with zero_grad()."""
    t.other.zero_grad()
    (t.model(t.other(x)) - 1).square().mean().backward()
    t.other_optimizer.step()
    t.model.zero_grad()
    t.model(t.other(x).detach()).square().mean().backward()
    t.optimizer.step()


def adversarial_examples(t: Training, x: torch.Tensor, set_to_none: bool = True) -> None:
    x = x.clone().requires_grad_()
    t.model(x).square().mean().backward()
    assert x.grad is not None
    t.optimizer.zero_grad(set_to_none)
    t.model(x.detach() + 0.1 * x.grad.sign()).square().mean().backward()
    t.optimizer.step()


def two_losses(t: Training, x: torch.Tensor) -> None:
    t.optimizer.zero_grad()
    y = t.model(x)
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()
    t.model(-x).square().mean().backward()
    t.optimizer.step()


def a_loss_for_each_parameter(t: Training, x: torch.Tensor) -> None:
    t.optimizer.zero_grad()
    y = t.model(x)
    y.square().mean().backward(inputs=[t.model.module.weight], retain_graph=True)
    y.abs().mean().backward(inputs=[t.model.module.bias])
    t.optimizer.step()


def frozen_critic(t: Training, x: torch.Tensor) -> None:
    critic_and_generator(t, x, frozen=True)


def zeroed_examples(t: Training, x: torch.Tensor) -> None:
    adversarial_examples(t, x, set_to_none=False)


def trained(body: Callable[[Training, torch.Tensor], None], limit: int | None) -> list[torch.Tensor]:
    t = Training(limit)
    for _ in t.loader.epochs(2):
        for (x,) in t.loader:
            body(t, x)
    return [p.detach() for p in t.model.parameters()]


@pytest.mark.parametrize(
    ("body", "since"),
    [
        (critic_and_generator, r"optimizer\.step\(\) was called"),
        (generator_and_critic, "cleared"),
        (adversarial_examples, "cleared"),
        (zeroed_examples, "cleared"),
    ],
)
def test_a_second_backward_that_would_count_what_the_script_discards_is_refused(
    body: Callable[[Training, torch.Tensor], None], since: str
) -> None:
    with pytest.raises(
        SecondBackwardError, match=f"(weight|bias).*{since}.*max_local_batch_size.*requires_grad_"
    ):
        trained(body, limit=4)
    trained(body, limit=16)  # one micro-batch a step


@pytest.mark.parametrize("body", [two_losses, a_loss_for_each_parameter])
def test_several_losses_in_micro_batches_are_those_of_the_whole_batch(
    body: Callable[[Training, torch.Tensor], None],
) -> None:
    for got, expected in zip(trained(body, limit=4), trained(body, limit=None), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_critic_that_is_frozen_for_the_generators_loss_trains_as_on_the_whole_batch() -> None:
    first_step = []
    for limit in (4, None):
        t = Training(limit)
        batches = iter(t.loader)
        for _ in range(1 if limit is None else 4):
            frozen_critic(t, next(batches)[0])
        first_step.append([p.detach().clone() for p in t.model.parameters()])
    for got, expected in zip(*first_step, strict=True):
        torch.testing.assert_close(got, expected)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.policy = nn.Linear(3, 1), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.value(x), self.policy(x)


class TrainingOfHeads:
    """One wrapped model whose heads have an optimizer each."""

    def __init__(self, limit: int | None) -> None:
        engine = Engine(None)
        self.heads = seeded(TwoHeads)
        self.of_value = torch.optim.SGD(self.heads.value.parameters(), lr=0.1)
        self.of_policy = torch.optim.SGD(self.heads.policy.parameters(), lr=0.1)
        optimizers = [self.of_value, self.of_policy]
        self.model = DistributedDataParallel(
            self.heads, optimizers=optimizers, find_unused_parameters=True, engine=engine
        )
        self.loader = ElasticDataLoader(
            TensorDataset(X), 16, max_local_batch_size=limit, shuffle=False, engine=engine
        )

    def value_then_policy(self, x: torch.Tensor) -> None:
        self.model(x)[0].square().mean().backward()
        self.of_value.step()
        self.of_value.zero_grad()
        self.model(x)[1].square().mean().backward()
        self.of_policy.step()
        self.of_policy.zero_grad()

    def value_twice(self, x: torch.Tensor) -> None:
        self.model(x)[0].square().mean().backward()
        self.of_value.step()
        self.of_value.zero_grad()
        self.model(x)[0].abs().mean().backward()


def trained_heads(
    body: Callable[[TrainingOfHeads, torch.Tensor], None], limit: int | None
) -> list[torch.Tensor]:
    t = TrainingOfHeads(limit)
    for _ in t.loader.epochs(2):
        for (x,) in t.loader:
            body(t, x)
    return [p.detach() for p in t.model.parameters()]


def test_heads_with_an_optimizer_each_may_be_stepped_and_cleared_between_their_backwards() -> None:
    got = trained_heads(TrainingOfHeads.value_then_policy, limit=4)
    expected = trained_heads(TrainingOfHeads.value_then_policy, limit=None)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_head_that_was_stepped_and_cleared_has_no_second_backward() -> None:
    with pytest.raises(SecondBackwardError, match=r"value.*optimizer\.step\(\) was called"):
        trained_heads(TrainingOfHeads.value_twice, limit=4)
