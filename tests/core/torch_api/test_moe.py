"""A mixture of experts: the expert of each token, and the output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bagua_core.torch_api as bagua
from bagua_core.torch_api.model_parallel.moe import MoE, is_moe_param, route


def test_the_best_expert_takes_a_token_and_its_gate_counts() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    routes = route(logits, 1, capacity=8)
    assert routes.experts_TK.tolist() == [[0], [1], [0]]
    torch.testing.assert_close(routes.weights_TK, F.softmax(logits, 1).max(1, keepdim=True).values)
    assert routes.counts_E.tolist() == [2, 1]


def test_a_full_expert_takes_the_earlier_tokens() -> None:
    routes = route(torch.tensor([[1.0, 0.0]] * 3), 1, capacity=2)
    assert (routes.weights_TK > 0).flatten().tolist() == [True, True, False]


def test_two_experts_share_a_token_by_their_gates() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    routes = route(logits, 2, capacity=8)
    assert routes.experts_TK.tolist() == [[0, 1], [2, 1]]
    torch.testing.assert_close(routes.weights_TK.sum(1), torch.ones(2))
    gates = F.softmax(logits, 1)
    torch.testing.assert_close(routes.weights_TK[0, 0], gates[0, 0] / (gates[0, 0] + gates[0, 1]))


def test_second_choices_stand_behind_first_ones() -> None:
    logits = torch.tensor([[2.0, 1.0], [1.0, 2.0], [1.0, 2.0]])
    weights = route(logits, 2, capacity=2).weights_TK
    assert (weights > 0).tolist() == [[True, False], [True, True], [True, False]]


def test_unused_tokens_take_no_place() -> None:
    routes = route(torch.tensor([[1.0, 0.0]] * 3), 1, capacity=1, used_T=torch.tensor([0, 1, 1]))
    assert (routes.weights_TK > 0).flatten().tolist() == [False, True, False]
    assert routes.counts_E.tolist() == [2, 0]


def test_even_experts_cost_least() -> None:
    even = route(torch.eye(4) * 9, 1, 8).balance_loss
    uneven = route(torch.tensor([[9.0, 0.0, 0.0, 0.0]] * 4), 1, 8).balance_loss
    assert even == pytest.approx(1.0, abs=1e-3) and uneven > 3.9


@pytest.mark.parametrize("k", [1, 2])
def test_an_output_is_the_experts_outputs_by_their_weights(k: int) -> None:
    torch.manual_seed(0)
    layer = MoE(6, nn.Linear(6, 6), num_local_experts=3, k=k, eval_capacity_factor=9.0).eval()
    for number, expert in enumerate(layer.experts):
        nn.init.constant_(expert.bias, float(number))  # type: ignore[arg-type]
    x = torch.randn(2, 5, 6)
    output, loss, counts = layer(x)
    tokens = x.reshape(-1, 6)
    gates = F.softmax(layer.gate(tokens), 1)
    top, chosen = gates.topk(k, dim=1)
    weights = top / top.sum(1, keepdim=True) if k == 2 else top
    expected = sum(
        weights[:, i : i + 1]
        * torch.stack([layer.experts[int(e)](t) for e, t in zip(chosen[:, i], tokens, strict=True)])
        for i in range(k)
    )
    torch.testing.assert_close(output, expected.view_as(x))  # type: ignore[union-attr]
    assert loss.requires_grad and int(counts.sum()) == 10


@pytest.mark.parametrize("policy", [None, "Jitter", "RSample"])
def test_gate_and_experts_learn(policy: str | None) -> None:
    torch.manual_seed(0)
    layer = MoE(4, nn.Linear(4, 4), num_local_experts=2, k=2, noisy_gate_policy=policy)
    output, loss, _ = layer(torch.randn(16, 4))
    (output.square().mean() + 0.01 * loss).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())
    assert not any(is_moe_param(p) for p in layer.parameters())


def test_what_there_is_not_is_refused() -> None:
    assert bagua.moe.MoE is MoE
    with pytest.raises(ValueError, match="k=3: a token goes to 1 or 2 experts"):
        MoE(4, nn.Linear(4, 4), 4, k=3)
    with pytest.raises(ValueError, match="noisy_gate_policy='Loud'"):
        MoE(4, nn.Linear(4, 4), 4, noisy_gate_policy="Loud")
    with pytest.raises(ValueError, match="at least k=2 experts"):
        MoE(4, nn.Linear(4, 4), 1, k=2)
