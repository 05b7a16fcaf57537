"""Batch normalization over several workers equals that of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import Communicator, Lane, Pending
from bagua_core.communication.devices.device_wait import Followed
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from bagua_core.sync_batchnorm import SyncBatchNorm, _StepPeers
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks, seeded


def net(layer: type[nn.Module], dimensions: int) -> nn.Module:
    if dimensions == 1:
        return nn.Sequential(nn.Linear(4, 5), layer(5), nn.Tanh(), nn.Linear(5, 2))
    return nn.Sequential(nn.Conv2d(4, 5, 2), layer(5), nn.Tanh(), nn.Conv2d(5, 2, 2))


def plain(dimensions: int) -> nn.Module:
    return seeded(lambda: net(nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d, dimensions))


def data(dimensions: int, samples: int = 12) -> torch.Tensor:
    shape = (samples, 4) if dimensions == 1 else (samples, 4, 5, 5)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 2 + 1


class BreakingEngine(FakeEngine):
    """As the real one, it gives the generation up when a step fails."""

    def reduction_failed(self, error: Exception) -> None:
        super().reduction_failed(error)
        communicator = self.communicator()
        assert communicator is not None
        communicator.abort(str(error))


class Worker:
    def __init__(self, communicator: Communicator, dimensions: int) -> None:
        self.engine = BreakingEngine(communicator)
        inner = SyncBatchNorm.convert(plain(dimensions))
        for layer in inner.modules():
            if isinstance(layer, SyncBatchNorm):
                layer._engine = self.engine
        self.model = DistributedDataParallel(inner, None, broadcast_buffers=False, engine=self.engine)
        self.global_rank = communicator.global_rank


def workers(size: int, dimensions: int) -> tuple[list[Worker], list[Communicator]]:
    main, lane = in_process_world(size), in_process_world(size)
    for a, b in zip(main, lane, strict=True):
        a.lanes = {Lane.STATISTICS: b}
    return [Worker(c, dimensions) for c in main], lane


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("shares", [(6, 6), (2, 7, 3), (1, 11), (5, 0, 7)])
def test_it_is_one_process_on_the_whole_batch(dimensions: int, shares: tuple[int, ...]) -> None:
    x, reference = data(dimensions), plain(dimensions)
    y = reference(x)
    (y**2).mean().backward()
    members, _ = workers(len(shares), dimensions)
    assert members[0].model.lanes == {Lane.STATISTICS}

    def act(w: Worker) -> None:
        begin = sum(shares[: w.global_rank])
        size = shares[w.global_rank]
        w.engine.current = MicroBatch(size / 12, True)
        part = x[begin : begin + size] if size else x[:1]  # one that heals is served a filler
        output = w.model(part)
        if size:
            torch.testing.assert_close(output, y[begin : begin + size])
        (output**2).mean().backward()
        for p, q in zip(w.model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        for b, c in zip(w.model.module.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(b, c)

    run_ranks(members, act)


def test_a_forward_without_gradients_counts_all_samples_too() -> None:
    """As for a teacher that is not trained, and for checkpointed layers, whose first forward has no gradients."""
    x, reference = data(1), plain(1)
    y = reference(x)
    members, _ = workers(2, 1)

    def act(w: Worker) -> None:
        own = slice(0, 6) if w.global_rank == 0 else slice(6, None)
        with torch.no_grad():
            torch.testing.assert_close(w.model(x[own]), y[own])
        for b, c in zip(w.model.module.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(b, c)

    run_ranks(members, act)


def test_evaluation_and_scripts_without_peers_see_plain_batch_norm() -> None:
    layer, reference = SyncBatchNorm(4), nn.BatchNorm1d(4)
    x = data(1)
    torch.testing.assert_close(layer(x), reference(x))
    layer.eval()
    reference.eval()
    torch.testing.assert_close(layer(x), reference(x))
    assert layer.state_dict().keys() == reference.state_dict().keys()
    with pytest.raises(ValueError, match=r"\[samples, features"):
        layer(torch.ones(4))


def test_a_loss_in_forward_fails_the_step_and_the_script_goes_on() -> None:
    members, lane = workers(2, 1)
    survivor = members[0]
    lane[0].abort("rank 1 is gone")
    output = survivor.model(data(1))
    assert survivor.engine.step_failed
    (output**2).mean().backward()
    assert all(not p.grad.any() for p in survivor.model.module.parameters() if p.grad is not None)


def test_a_loss_in_backward_fails_the_step_too() -> None:
    members, lane = workers(2, 1)

    def act(w: Worker) -> None:
        output = w.model(data(1))
        if w.global_rank == 1:
            lane[1].abort("goes")
            return
        lane[0].abort("rank 1 is gone")
        (output**2).mean().backward()
        assert w.engine.step_failed
        assert all(not p.grad.any() for p in w.model.module.parameters() if p.grad is not None)

    run_ranks(members, act)


def test_conversion_keeps_parameters_and_buffers() -> None:
    before = plain(2)
    parameters, buffers = list(before.parameters()), list(before.buffers())
    after = SyncBatchNorm.convert(before)
    assert all(p is q for p, q in zip(parameters, after.parameters(), strict=True))
    assert all(p is q for p, q in zip(buffers, after.buffers(), strict=True))
    assert any(isinstance(m, SyncBatchNorm) for m in after.modules())


def test_a_layer_with_several_names_is_one_converted_layer() -> None:
    layer, block = nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(4, 4), layer, block, nn.Linear(4, 4), layer, nn.Sequential(layer), block)
    after = SyncBatchNorm.convert(model)
    assert isinstance(after[1], SyncBatchNorm) and after[1] is after[4] is after[5][0]
    assert isinstance(block[0], SyncBatchNorm) and after[2] is block is after[6]


def test_a_layer_of_no_wrapped_model_is_refused_in_a_step() -> None:
    layer = SyncBatchNorm(4, engine=FakeEngine(in_process_world(1)[0]))
    with pytest.raises(RuntimeError, match="wrap the model that contains it"):
        layer(data(1))


@pytest.mark.parametrize("reduced", [False, True])
def test_the_host_waits_for_statistics_that_no_vote_follows(reduced: bool) -> None:
    """Behind the step's reduction: what fails there must be known before the step is committed."""
    world = in_process_world(1)[0]
    waited: list[Pending] = []

    class Reduced(FakeEngine):
        @property
        def is_final(self) -> bool:
            return reduced

        def wait(self, pending: Pending) -> None:
            waited.append(pending)
            super().wait(pending)

    peers = _StepPeers(Reduced(world), world)
    assert peers.gather(torch.ones(3)).tolist() == [[1.0, 1.0, 1.0]]
    assert [isinstance(pending, Followed) for pending in waited] == [not reduced]


def test_a_loss_behind_the_steps_reduction_fails_the_step() -> None:
    """Else statistics of this rank's samples alone would be committed."""
    torch.manual_seed(5)
    engine = Engine(None)
    lane, other = in_process_world(2)
    other.lose("10.0.0.9")
    engine.next_step()
    engine.reduction_done(None)
    peers = _StepPeers(engine, lane)
    assert peers.total(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert engine.step_failed
