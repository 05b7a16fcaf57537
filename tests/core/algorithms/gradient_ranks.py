"""Threads as ranks that train one small model with an algorithm for gradients, and what their gradient should be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from bagua_core.algorithms import Algorithm
from bagua_core.communication.communicator import Communicator, Lane, Pending
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import FakeEngine, run_ranks, seeded

SAMPLES = 24
X = torch.randn(SAMPLES, 70, generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
BUCKET_CAP_MB = 0.0009  # so that each layer has buckets of its own


def net() -> nn.Module:
    """A tiny bucket and two that are compressed; the last one is."""
    return nn.Sequential(nn.Linear(70, 301), nn.Tanh(), nn.Linear(301, 173), nn.Tanh(), nn.Linear(173, 3))


def small_last() -> nn.Module:
    """The last bucket is tiny, and not compressed."""
    return nn.Sequential(nn.Linear(70, 4), nn.Tanh(), nn.Linear(4, 6000), nn.Tanh(), nn.Linear(6000, 3))


class Branches(nn.Module):
    """Two branches, of which some steps use one. Each has buckets of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(70, 301), nn.Tanh(), nn.Linear(301, 3)) for _ in range(2))
        self.used = "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([getattr(self, name)(x) for name in self.used]).sum(0)


def loss_of(model: nn.Module, begin: int, end: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    found: torch.Tensor = nn.functional.mse_loss(model(X[begin:end].to(dtype)), Y[begin:end].to(dtype))
    return found


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def steps_with(members: Sequence[Rank], *branches: str) -> None:
    """Takes one step of a model of Branches for each of `branches`, with those that it names."""
    for used in branches:
        for member in members:
            member.inner.used = used  # type: ignore[assignment]
        assert run_ranks(members, lambda r: r.step()) == [True] * len(members)


def shares(world_size: int) -> list[tuple[int, int]]:
    """Uneven where possible; they make up the batch."""
    cuts = [0, *(min(SAMPLES - 1, 2 + r * SAMPLES // world_size) for r in range(1, world_size)), SAMPLES]
    return list(pairwise(cuts))


class Rank:
    """One worker: a model, its algorithm, and an engine that takes notes."""

    def __init__(
        self,
        communicator: Communicator | None,
        algorithm: Algorithm | Callable[[torch.optim.Optimizer], Algorithm],
        build: Callable[[], nn.Module] = net,
        dtype: torch.dtype = torch.float32,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1),
        find_unused: bool = False,
    ) -> None:
        self.engine = FakeEngine(communicator)
        self.inner = seeded(build).to(dtype)
        self.optimizer = optimizer(self.inner.parameters())
        self.share = (0, SAMPLES)
        self.bring(communicator, None)
        chosen = algorithm if isinstance(algorithm, Algorithm) else algorithm(self.optimizer)
        self.model = DistributedDataParallel(
            self.inner,
            [self.optimizer],
            chosen,
            bucket_cap_mb=BUCKET_CAP_MB,
            find_unused_parameters=find_unused,
            engine=self.engine,
        )

    @property
    def global_rank(self) -> int:
        communicator = self.engine.communicator()
        return communicator.global_rank if communicator else 0

    def bring(self, communicator: Communicator | None, share: tuple[int, int] | None) -> None:
        """Another generation, with a share of the batch; None: the usual one."""
        self.engine.enter(communicator)
        if share is None:
            rank, size = (communicator.global_rank, communicator.world_size) if communicator else (0, 1)
            share = shares(size)[rank]
        self.share = share
        self.engine.current = MicroBatch((share[1] - share[0]) / SAMPLES, True)

    def move_to(self, communicator: Communicator | None, share: tuple[int, int] | None = None) -> None:
        self.model.step_rolled_back()
        self.bring(communicator, share)
        self.model.communicator_changed()

    def backward(self) -> None:
        self.inner.zero_grad()
        begin, end = self.share
        if begin == end:
            (loss_of(self.model, 0, 1) * torch.nan).backward()  # a filler, whose gradient must not count
        else:
            loss_of(self.model, begin, end).backward()

    def step(self) -> bool:
        """Whether it happened."""
        self.backward()
        if self.engine.step_failed:
            return False
        self.optimizer.step()
        self.model.step_committed()
        self.engine.step += 1
        return True

    def gradients(self) -> list[torch.Tensor]:
        return gradients(self.inner)

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.inner.parameters()]


def exact(member: Rank, world_size: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """(the mean gradient of the batch at the member's parameters, what each of `world_size` ranks contributes to it).
    The mean is in fp32."""
    parts: list[list[torch.Tensor]] = []
    for begin, end in shares(world_size):
        member.inner.zero_grad()
        model = member.inner
        loss_of(model, begin, end).backward()
        parts.append([g * ((end - begin) / SAMPLES) for g in gradients(model)])
    member.inner.zero_grad()
    return [torch.stack(of_one).float().sum(0) for of_one in zip(*parts, strict=True)], parts


def assert_equal_bits(found: Sequence[Sequence[torch.Tensor]]) -> None:
    for other in found[1:]:
        assert len(other) == len(found[0])
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def world_on_nodes(nodes: Sequence[int], generation: int = 1) -> list[Communicator]:
    """In-process communicators with lanes; nodes: how many workers each has."""
    size = sum(nodes)
    main = build_in_process(size, generation)
    begins = [sum(nodes[:i]) for i in range(len(nodes))]
    leaders = build_in_process(len(nodes), generation, [main[b].abort_flag.below() for b in begins])
    ranks = tuple(tuple(range(b, b + n)) for b, n in zip(begins, nodes, strict=True))
    for node, of_node in enumerate(ranks):
        lane = build_in_process(len(of_node), generation, [main[r].abort_flag.below() for r in of_node])
        for place, rank in enumerate(of_node):
            main[rank].nodes = ranks
            main[rank].lanes = {Lane.NODE: lane[place]}
            if place == 0:
                main[rank].lanes = {Lane.NODE: lane[0], Lane.LEADERS: leaders[node]}
    return list(main)


def break_at(world: Sequence[Communicator], what: str, number: int, global_rank: int = 0) -> threading.Event:
    """When `global_rank` starts its collective `what` (of its communicator or a lane) for the number-th time, all ranks
    learn that the generation is over. Returns what is set then."""
    happened = threading.Event()
    seen = [0]
    here = world[global_rank]

    def breaking(original: Callable[..., Pending]) -> Callable[..., Pending]:
        def start(*arguments: Any, **keywords: Any) -> Pending:
            seen[0] += 1
            if seen[0] == number:
                for each in world:
                    each.abort("the test ends the generation")
                happened.set()
            return original(*arguments, **keywords)

        return start

    for each in (here, *here.lanes.values()):
        setattr(each, what, breaking(getattr(each, what)))
    return happened
