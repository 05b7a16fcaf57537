"""Provides a mixture of experts whose experts are on every worker.

The original put num_local_experts on each worker and sent tokens to them. A lost worker would take its experts with it,
and a job that goes on without a worker needs its whole state on those that are left. So every worker holds all experts
here and trains them on its own tokens; their gradients are averaged as all others are. The formula of an output is the
original's. The memory for experts is that of all workers together.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bagua_core.torch_api.communication import get_world_size

__all__ = ["MoE", "is_moe_param"]

POLICIES = (None, "None", "Jitter", "RSample")
JITTER = 1e-2


def is_moe_param(parameter: torch.Tensor) -> bool:
    """Tells whether a parameter belongs to one worker alone: none does."""
    return False


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts to which tokens go.

    experts_TK, weights_TK: of each token the experts that take it, and what their outputs count; a weight of 0 where
    the expert is full. balance_loss: grows with the difference between experts. counts_E: tokens that chose an expert
    first.
    """

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor
    balance_loss: torch.Tensor
    counts_E: torch.Tensor


def route(
    logits_TE: torch.Tensor,
    k: int,
    capacity: int,
    noise_TE: torch.Tensor | None = None,
    used_T: torch.Tensor | None = None,
) -> Routes:
    """Returns the routes to the k best experts of each token, as far as they have room for `capacity` tokens; earlier
    tokens go first.

    noise_TE: added where the last of the k choices is made. used_T: 0 for tokens that no expert should take.
    Source: GShard (arXiv 2006.16668), algorithm 1.
    """
    experts = logits_TE.shape[1]
    gates = F.softmax(logits_TE, dim=1)
    noisy = logits_TE if noise_TE is None else logits_TE + noise_TE
    first = (noisy if k == 1 else logits_TE).argmax(dim=1)
    choices = [first]
    if k == 2:
        others = noisy.masked_fill(F.one_hot(first, experts).bool(), float("-inf"))
        choices.append(others.argmax(dim=1))
    taken = torch.zeros(experts, dtype=torch.long, device=logits_TE.device)
    weights = []
    for choice in choices:
        mask = F.one_hot(choice, experts)
        if used_T is not None:
            mask = mask * used_T.reshape(-1, 1).to(mask.dtype)
        place = ((mask.cumsum(0) - 1 + taken) * mask).sum(1)
        keeps = mask.sum(1).bool() & (place < capacity)
        taken = taken + mask.sum(0)
        weights.append(gates.gather(1, choice.unsqueeze(1)).squeeze(1) * keeps)
        if len(weights) == 1:
            counts = mask.sum(0)
            share = mask.to(gates.dtype).mean(0)
    kept = torch.stack(weights, dim=1)
    if k == 2:
        kept = kept / kept.sum(1, keepdim=True).clamp(min=torch.finfo(kept.dtype).eps)
    balance = (gates.mean(0) * share).sum() * experts
    return Routes(torch.stack(choices, dim=1), kept, balance, counts.detach().cpu())


class MoE(nn.Module):
    """A mixture of num_local_experts for each worker that there is now, all of them on every worker, copies of
    `expert`.

    hidden_size: of inputs [..., hidden_size] and outputs.
    k: 1 or 2 experts take a token.
    capacity_factor: an expert takes k * tokens / experts times this, min_capacity at least (k = 1); what no expert has
    room for comes out as zero. eval_capacity_factor: the same in eval mode.
    output_dropout_prob: probability with which an element of the output is zeroed in training.
    noisy_gate_policy: None, "Jitter" or "RSample", in training.
    disable_alltoall: ignored, there is none.
    Raises ValueError.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        disable_alltoall: bool = False,
    ) -> None:
        super().__init__()
        if k not in (1, 2):
            raise ValueError(f"k={k}: a token goes to 1 or 2 experts")
        if noisy_gate_policy not in POLICIES:
            raise ValueError(f'noisy_gate_policy={noisy_gate_policy!r}; use None, "Jitter" or "RSample"')
        self.num_experts = num_local_experts * get_world_size()
        if self.num_experts < k:
            raise ValueError(f"num_local_experts={num_local_experts}: there must be at least k={k} experts")
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.gate = nn.Linear(hidden_size, self.num_experts, bias=False)
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(self.num_experts))
        self.dropout = nn.Dropout(output_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the output, the loss that balances the experts, and how many tokens chose each expert first.

        hidden_states: [..., hidden_size], the shape of the output too.
        used_token: one number a token, 0 for those that no expert takes.
        The loss is a scalar, the counts are [experts].
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes = self._route(tokens, used_token)
        combined = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen, rank = ((routes.experts_TK == number) & (routes.weights_TK > 0)).nonzero(as_tuple=True)
            if not len(chosen):
                continue
            output = expert(tokens[chosen])
            output = output[0] if isinstance(output, tuple) else output
            weight = routes.weights_TK[chosen, rank].unsqueeze(1).to(output.dtype)
            combined = combined.index_add(0, chosen, (output * weight).to(combined.dtype))
        return self.dropout(combined.view_as(hidden_states)), routes.balance_loss, routes.counts_E

    def _route(self, tokens: torch.Tensor, used: torch.Tensor | None) -> Routes:
        inputs = tokens.float()
        policy = self.noisy_gate_policy if self.training else None
        if policy == "Jitter":
            inputs = inputs * torch.empty_like(inputs).uniform_(1.0 - JITTER, 1.0 + JITTER)
        logits = F.linear(inputs, self.gate.weight.float())
        noise = None
        if policy == "RSample" or (self.k == 2 and self.training):
            noise = -torch.empty_like(logits).exponential_().log()
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = math.ceil(self.k * len(tokens) / self.num_experts * factor)
        return route(logits, self.k, max(capacity, self.min_capacity if self.k == 1 else 1), noise, used)
