"""Workers that share weights, as threads; the same training again, slowly, by one process; and faults at any point.

A worker's step is what the engine makes of it: forward, backward, optimizer, then commit or roll back. `Replica` is one
worker's model in the simulation: what happens to its weights between steps is each test's formula.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bagua_core.algorithms import Algorithm
from bagua_core.communication.communicator import Communicator, Lane
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.communication.topology.lanes import Nodes, members_of
from bagua_core.communication.weights.weight_exchange import WeightExchange
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.in_process import InProcessCommunicator
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank: int, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + part)
    return torch.randn(4, 6, generator=generator) + rank


@dataclass(frozen=True, slots=True)
class Shares:
    """weights[rank]: of that rank's micro-batches in a step."""

    weights: tuple[tuple[float, ...], ...]

    @staticmethod
    def even(size: int) -> Shares:
        return Shares(tuple((1.0 / size,) for _ in range(size)))

    @staticmethod
    def uneven(size: int, parts: int = 1) -> Shares:
        """Rank r has r + 1 parts of all samples, divided unevenly over its micro-batches."""
        total, inner = size * (size + 1) / 2, parts * (parts + 1) / 2
        return Shares(
            tuple(tuple((r + 1) / total * (p + 1) / inner for p in range(parts)) for r in range(size))
        )


def give(flat: torch.Tensor, module: nn.Module) -> None:
    """New memory too, as scripts may do."""
    parameters = list(module.parameters())
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.clone().to(parameter.dtype).view(parameter.shape)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1.0).square().mean()


class Worker:
    def __init__(
        self,
        communicator: Communicator | None,
        algorithm: Algorithm,
        optimizer: MakeOptimizer = sgd,
        build: Callable[[], nn.Module] = small_model,
        rank: int | None = None,
    ) -> None:
        self.rank = rank if rank is not None else communicator.global_rank if communicator else 0
        self.engine = FakeEngine(communicator)
        self.seen: list[torch.Tensor] = []  # the weights with which each step's forward began
        self.inner = seeded(build)
        self.optimizer = optimizer(list(self.inner.parameters()))
        self.model = DistributedDataParallel(self.inner, [self.optimizer], algorithm, engine=self.engine)
        self.inner.register_forward_pre_hook(lambda *_: self.seen.append(self.weights()))

    @property
    def exchange(self) -> WeightExchange:
        exchange = self.model._exchange
        assert isinstance(exchange, WeightExchange)
        return exchange

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.inner.parameters()])

    def set_weights(self, flat: torch.Tensor) -> None:
        give(flat, self.inner)

    def train(self, shares: Shares) -> bool:
        """A step and its end; whether it was committed."""
        weights = shares.weights[self.rank]
        self.optimizer.zero_grad()
        for part, weight in enumerate(weights):
            self.engine.begin_micro_batch(MicroBatch(weight, part == len(weights) - 1))
            loss_of(self.model(batch(self.rank, self.engine.step, part))).backward()
            self.optimizer.step()
        return self.end_step()

    def end_step(self) -> bool:
        if self.engine.step_failed:
            self.model.step_rolled_back()
            return False
        self.engine.step += 1
        self.model.step_committed()
        return True

    def enter(self, communicator: Communicator | None) -> None:
        """The first step of another generation."""
        self.engine.enter(communicator)
        self.rank = communicator.global_rank if communicator else 0
        self.model.communicator_changed()

    def heal_from(self, holder: Worker) -> None:
        """All that travels."""
        self.set_weights(holder.weights())
        self.optimizer.load_state_dict(copy.deepcopy(holder.optimizer.state_dict()))
        for name, tensor in self.model.travelling().items():
            tensor.copy_(holder.model.travelling()[name])
        self.engine.step = holder.engine.step


class Replica:
    """One worker's model and optimizer in the simulation."""

    def __init__(
        self,
        rank: int,
        optimizer: MakeOptimizer = sgd,
        like: Worker | None = None,
        build: Callable[[], nn.Module] = small_model,
    ) -> None:
        self.rank = rank
        self.inner = seeded(build)
        self.optimizer = optimizer(list(self.inner.parameters()))
        if like is not None:
            self.set_weights(like.weights())
            self.optimizer.load_state_dict(copy.deepcopy(like.optimizer.state_dict()))

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.inner.parameters()])

    def set_weights(self, flat: torch.Tensor) -> None:
        give(flat, self.inner)

    def learn(self, step: int, shares: Shares) -> None:
        """The mean gradient of its own samples, here and now: with the same roundings as the workers'."""
        weights = shares.weights[self.rank]
        parameters = list(self.inner.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for part, weight in enumerate(weights):
            loss = loss_of(self.inner(batch(self.rank, step, part)))
            for into, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                into.add_(gradient, alpha=weight)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient / sum(weights)

    def step(self) -> None:
        self.optimizer.step()


def workers(
    size: int,
    algorithm: Algorithm,
    optimizer: MakeOptimizer = sgd,
    nodes: Nodes = (),
    build: Callable[[], nn.Module] = small_model,
) -> list[Worker]:
    return [Worker(c, algorithm, optimizer, build) for c in world(size, nodes)]


def world(size: int, nodes: Nodes = (), generation: int = 1) -> list[Communicator]:
    """nodes: the lanes NODE and LEADERS are there too."""
    main = in_process_world(size, generation)
    lanes: list[dict[Lane, Communicator]] = [{} for _ in range(size)]
    groups = [(Lane.NODE, ranks) for ranks in nodes]
    if nodes:
        leaders = members_of(Lane.LEADERS, nodes, nodes[0][0])
        assert leaders is not None
        groups.append((Lane.LEADERS, leaders))
    for lane, ranks in groups:
        for rank, communicator in zip(ranks, in_process_world(len(ranks), generation), strict=True):
            lanes[rank][lane] = communicator
    for communicator, own in zip(main, lanes, strict=True):
        communicator.nodes, communicator.lanes = nodes, own
    return main


def train_all(members: Sequence[Worker], steps: int, shares: Shares) -> None:
    def act(worker: Worker) -> None:
        for _ in range(steps):
            assert worker.train(shares)

    run_ranks(members, act)


# -- faults


class Lossy:
    """A communicator that loses the whole world, lanes included, when its rank starts operation `at` (from 0)."""

    STARTING = frozenset({"allreduce", "broadcast", "allgather", "send", "receive", "alltoall"})

    def __init__(
        self, inner: Communicator, started: list[str], at: int, everyone: list[Communicator]
    ) -> None:
        self._inner = inner
        self._started = started
        self._at = at
        self._everybody = everyone
        self.lanes = {lane: Lossy(c, started, at, everyone) for lane, c in inner.lanes.items()}

    def __getattr__(self, name: str) -> Any:
        if name == "swap":  # of operations that can be lost each
            return partial(Communicator.swap, self)  # type: ignore[arg-type]
        if name in self.STARTING:
            if len(self._started) == self._at:
                for communicator in self._everybody:
                    assert isinstance(communicator, InProcessCommunicator)
                    communicator.lose("10.0.0.9")
            self._started.append(name)
        return getattr(self._inner, name)


def lossy_world(size: int, at: int, by: int, nodes: Nodes = ()) -> tuple[list[Communicator], list[str]]:
    """A world that is lost when rank `by` starts its operation `at`; and the names of what it has started."""
    main = world(size, nodes)
    everyone = [c for m in main for c in (m, *m.lanes.values())]
    started: list[str] = []
    main[by] = Lossy(main[by], started, at, everyone)  # type: ignore[call-overload]
    return main, started
