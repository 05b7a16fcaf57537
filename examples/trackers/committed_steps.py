"""Logs each committed step once, whichever worker has rank 0 by then, and each change of membership as a marker.

The training of the examples beside this file, each of which gives it a tracker. What a loop body computes is no result
yet: its step may be rolled back and done again. It is committed when the loader's next draw says a higher step. So
values wait for the next draw, and the worker that had rank 0 in their step writes them. If that worker is lost just
then, its newest point is missing; no point is written twice.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core as bagua


class Tracker(Protocol):
    def values(self, step: int, values: dict[str, float]) -> None: ...

    def marker(self, step: int, generation: int, world_size: int) -> None:
        """The workers have changed before `step`."""

    def close(self) -> None: ...


class CommittedSteps:
    """open_tracker(step): called by a worker that has something to write for the first time."""

    def __init__(self, open_tracker: Callable[[int], Tracker]) -> None:
        self._open = open_tracker
        self._tracker: Tracker | None = None
        self._waiting: tuple[int, bool, dict[str, float]] | None = None
        self._generation = 0

    def drawn(self, step: int) -> None:
        """At the top of the loop body. step: the loader's, the one that begins now."""
        self._write_committed(step)
        generation = bagua.generation()
        if generation != self._generation:
            self._generation = generation
            if bagua.get_rank() == 0:
                self._opened(step).marker(step, generation, bagua.get_world_size())

    def record(self, step: int, **values: float) -> None:
        """Of the step under way."""
        self._waiting = step, bagua.get_rank() == 0, values

    def close(self) -> None:
        """After the last epoch: every step is committed."""
        self._write_committed(1 << 62)
        if self._tracker is not None:
            self._tracker.close()

    def _write_committed(self, step: int) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting[1] and waiting[0] < step:
            self._opened(waiting[0]).values(waiting[0], waiting[2])

    def _opened(self, step: int) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open(step)
        return self._tracker


def train(open_tracker: Callable[[int], Tracker], epochs: int) -> None:
    """A small regression."""
    bagua.init_process_group()
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
    loader = bagua.ElasticDataLoader(data, global_batch_size=32, seed=0)
    log = CommittedSteps(open_tracker)
    for _ in loader.epochs(epochs):
        for x, y in loader:
            step = loader.step
            log.drawn(step)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            log.record(step, loss=loss.item())  # of this worker's share of the batch
    log.close()
