"""Buffers of rank 0 are used by all, as with torch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.model.module_buffers import ModuleBuffers
from tests.core.communication.in_process import InProcessCommunicator
from tests.core.communication.worlds import gloo_world, in_process_world, run_ranks, seeded
from tests.core.wrapped_worker import Worker


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return y


def test_buffers_of_rank_0_are_used_by_all() -> None:
    workers = [Worker(c, Normed) for c in in_process_world(2)]
    x = torch.randn(2, 5, 4)
    workers[1].model.module.flags.zero_()

    def act(w: Worker) -> list[torch.Tensor]:
        communicator = w.engine.communicator()
        assert communicator is not None
        for _ in range(2):
            w.train(x[communicator.global_rank])
        w.model(x[0])  # begins by sharing the buffers, then both see the same data
        return [b.clone() for b in w.model.buffers()]

    first, second = run_ranks(workers, act)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert int(workers[1].model.module.norm.num_batches_tracked) == 3
    workers[1].model.eval()(x[0])  # alone, and waits for no other


class Growing(nn.Module):
    """Its buffers appear and grow in forwards. late: in a submodule that has no buffer when the model is wrapped."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.layer, self.inner, self.late = nn.Linear(4, 2), nn.Identity(), late
        if not late:
            self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late and not self.inner._buffers:
            self.inner.register_buffer("scale", torch.ones(3))
        if not self.late:
            self.cache = torch.cat([self.cache, torch.ones(1)])
        y: torch.Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("build", [in_process_world, gloo_world])
def test_a_joiner_whose_buffers_have_other_shapes_keeps_them_until_it_has_its_copy(
    build: Callable[[int], Sequence[Communicator]], late: bool
) -> None:
    holder, *others = workers = [Worker(None, lambda: Growing(late)) for _ in range(3)]  # type: ignore[arg-type]
    for worker in workers[:2]:
        for _ in range(3):
            worker.model.module(torch.ones(3, 4))
    joiner = others[1]
    if not late:
        holder.model.module.cache.fill_(7.0)
    for worker, communicator in zip(workers, build(3), strict=True):
        worker.engine.enter(communicator)
        worker.engine.in_step, worker.engine.healing = True, frozenset({2})
        worker.model.communicator_changed()

    def step(worker: Worker) -> None:
        worker.train()
        assert worker.engine.failed is None
        if worker is joiner and worker.engine.healing:  # its copy comes with the reduction
            for module, source in zip(
                worker.model.module.modules(), holder.model.module.modules(), strict=True
            ):
                module._buffers.update({name: torch.zeros_like(b) for name, b in source._buffers.items()})
        worker.model.step_committed()
        worker.engine.healing = frozenset()

    run_ranks(workers, step)
    assert late or others[0].model.module.cache.tolist() == holder.model.module.cache.tolist()
    holder.model.module.inner._buffers.update(
        {n: b + 1 for n, b in holder.model.module.inner._buffers.items()}
    )
    run_ranks(workers, step)
    found = [{n: b.tolist() for n, b in worker.model.module.named_buffers()} for worker in workers]
    assert found[0] and found[0] == found[1] == found[2]


def test_two_forwards_with_running_statistics_may_share_a_backward() -> None:
    """Sharing rank 0's statistics before the second forward must not spoil the first one's graph."""
    workers = [Worker(c, Normed) for c in in_process_world(2)]
    x = torch.randn(2, 2, 5, 4)

    def act(w: Worker) -> torch.Tensor:
        communicator = w.engine.communicator()
        assert isinstance(communicator, InProcessCommunicator)
        for _ in range(2):  # in the second round the ranks' own statistics differ before each forward
            one, other = (w.model(part) for part in x[communicator.global_rank])
            w.optimizer.zero_grad()
            try:
                (one * other).sum().backward()
            except RuntimeError:
                communicator.lose("10.0.0.9")  # so that the other rank ends too
                raise
            w.optimizer.step()
        return w.weights()

    first, second = run_ranks(workers, act)
    assert torch.equal(first, second)

    alone = seeded(Normed)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for one, other in x:
            ((alone(one) * alone(other)).sum() / len(x)).backward()
        optimizer.step()
    torch.testing.assert_close(first, torch.cat([p.detach().reshape(-1) for p in alone.parameters()]))


def test_buffers_that_a_backward_uses_are_still_watched_by_autograd() -> None:
    """The backward of a normalization in evaluation mode uses its statistics: changing them unseen would be wrong."""
    model = seeded(Normed)
    assert [id(b) for b in ModuleBuffers(model).statistics()] == [
        id(model.norm.running_mean),
        id(model.norm.running_var),
    ]
    model.norm.eval()
    assert ModuleBuffers(model).statistics() == []


def test_a_loss_while_buffers_are_shared_fails_the_step_and_not_the_forward() -> None:
    world = in_process_world(2)
    survivor = Worker(world[0], Normed)
    assert isinstance(world[1], InProcessCommunicator)
    world[1].lose("10.0.0.9")
    before = survivor.weights()
    survivor.train(torch.randn(5, 4))
    assert isinstance(survivor.engine.failed, CollectiveFailed)
    assert torch.equal(survivor.weights(), before)
