"""What a filler's forward writes to buffers from other workers' rows stays, as on the workers with samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_core as bagua
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.parallel import DistributedDataParallel
from tests.core.collectives.calls import acting, rank_of
from tests.core.communication.worlds import FakeEngine
from tests.core.elastic.worlds_of_workers import Job, Worker, run


class Contrast(nn.Module):
    """Its queue holds the newest features of all workers; its normalization sees this worker's samples alone."""

    queue: torch.Tensor

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.layer.weight)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(3, 2))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.enqueue, x, use_reentrant=False) if self.checkpoints else self.enqueue(x)

    def enqueue(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        rows = bagua.allgather_rows(y)
        self.queue.copy_(torch.cat([rows, self.queue])[:3])
        return self.norm(y)


class StepEngine(FakeEngine):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.communicator)
        self.worker = worker

    @property
    def answered_collectives(self) -> int:  # type: ignore[override]
        return self.worker.collectives.answered_in_step


def trained(worker: Worker, fillers: set[int], checkpoints: bool) -> Contrast:
    """After two steps on two samples each; `fillers` are the ranks without samples."""
    engine, rank = StepEngine(worker), rank_of(worker)
    module = Contrast(checkpoints)
    model = DistributedDataParallel(module, None, broadcast_buffers=False, engine=engine)
    engine.begin_micro_batch(MicroBatch(0.0 if rank in fillers else 1.0, True))
    for step in (1, 2):
        model(torch.tensor([[10.0 * rank, step], [0.0, step]])).sum().backward()
    return module


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_queue_of_gathered_rows_is_equal_on_workers_without_samples(checkpoints: bool) -> None:
    job = Job(2)
    for worker, has_fillers in zip(job.workers, (True, False), strict=True):
        worker.in_step, worker.has_fillers = True, has_fillers
    filler, real = run(job, acting(lambda worker: trained(worker, {0}, checkpoints)))
    assert torch.equal(filler.queue, real.queue)
    assert real.queue.tolist() == (
        [[12, 12], [2, 2], [12, 12]] if checkpoints else [[12, 12], [2, 2], [11, 11]]
    )
    assert filler.norm.num_batches_tracked == 0, "no other worker has part in these"
    assert torch.equal(filler.norm.running_mean, torch.zeros(2)) and real.norm.running_mean.all()


def test_without_other_workers_a_filler_leaves_the_queue() -> None:
    (worker,) = (job := Job(1)).workers
    worker.in_step = worker.has_fillers = True
    (module,) = run(job, acting(lambda worker: trained(worker, {0}, False)))
    assert not module.queue.any(), "rows of fillers are none of the job's"
