"""A stream, a model and its plain training: what the frameworks' elastic trainings on a stream are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset

SAMPLES, EPOCHS, BATCH = 237, 3, 24
BATCHES = 10  # in an epoch, the last one of 21 items
ACCUMULATED = 4  # so the last group of an epoch has two batches


class Items(IterableDataset[dict[str, Any]]):
    """In another order in each epoch; without a length."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
        self.epoch = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.at = 0
        return self._rest()

    def _rest(self) -> Iterator[dict[str, Any]]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < SAMPLES:
            x = self.x[order[self.at]]
            self.at += 1
            yield {"x": x, "labels": (x.sum() > 0).long()}
        self.at = 0


class ItemsWithState(Items):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._rest()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


KINDS = {"plain": Items, "state": ItemsWithState}


class Classifier(torch.nn.Module):
    """Equal in every process, and without a state that depends on how a batch is divided."""

    accepts_loss_kwargs = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def train_plainly(accumulated: int) -> tuple[dict[str, torch.Tensor], int]:
    """A loop in one process, without any framework. The parameters at the end, and the number of optimizer steps."""
    stream, model = Items(), Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = 0
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        items = list(stream)
        for batch in range(BATCHES):
            own = items[batch * BATCH : (batch + 1) * BATCH]
            x, labels = torch.stack([i["x"] for i in own]), torch.stack([i["labels"] for i in own])
            (model(x, labels)["loss"] / accumulated).backward()
            if (batch + 1) % accumulated == 0 or batch == BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
    return model.state_dict(), updates
