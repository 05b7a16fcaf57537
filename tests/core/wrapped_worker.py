"""A worker of the tests: a small wrapped model with its optimizer and an engine of its own."""

from __future__ import annotations

import torch
from torch import nn

from bagua_core.communication.communicator import Communicator
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine, seeded


class Worker:
    def __init__(
        self, communicator: Communicator | None = None, build: type[nn.Module] | None = None
    ) -> None:
        self.engine = FakeEngine(communicator)
        inner = seeded(build or (lambda: nn.Linear(4, 2)))
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        self.model = DistributedDataParallel(inner, optimizers=[self.optimizer], engine=self.engine)

    def train(self, x: torch.Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 4) if x is None else x).sum().backward()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.model.parameters()])
