"""DistributedDataParallel as a script sees it: wrapping, buffers, and when optimizers really step."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from bagua_core.algorithms import Algorithm, ByteGrad, UnknownAlgorithmError, algorithm_names, find_algorithm
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.communication.reduction.contributions import SparseGradientError
from bagua_core.communication.step_interface import MicroBatch, Model, StepEngine
from bagua_core.optimizers.optimizer_gate import gate_optimizer, gate_scaler, gate_scheduler
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.in_process import InProcessCommunicator
from tests.core.communication.worlds import FakeEngine, in_process_world, run_ranks
from tests.core.wrapped_worker import Worker

ROOT = Path(__file__).parents[2]
LAST, NOT_LAST = MicroBatch(1.0, True), MicroBatch(0.5, False)


def test_it_is_what_engine_and_torch_expect() -> None:
    worker = Worker()
    engine: StepEngine = worker.engine
    model: Model = worker.model
    assert worker.engine.models == [worker.model]
    assert model.algorithm_name == "gradient_allreduce"
    assert model.optimizers == [worker.optimizer]
    assert engine.in_step
    torch_like = nn.DataParallel(nn.Linear(4, 2))
    assert (
        list(worker.model.state_dict()) == list(torch_like.state_dict()) == ["module.weight", "module.bias"]
    )
    worker.model.load_state_dict(torch_like.state_dict())
    assert torch.equal(worker.model.module.weight, torch_like.module.weight)


def test_algorithms_are_found_by_name() -> None:
    found = find_algorithm("gradient_allreduce")
    assert isinstance(found, Algorithm)
    assert find_algorithm(found) is found
    assert "gradient_allreduce" in algorithm_names()
    with pytest.raises(
        UnknownAlgorithmError, match=r"'gradient_alreduce' is unknown; use one of .*gradient_allreduce"
    ):
        DistributedDataParallel(nn.Linear(1, 1), None, algorithm="gradient_alreduce", engine=FakeEngine())


def test_models_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(SparseGradientError, match="table has sparse=True"):
        DistributedDataParallel(
            nn.ModuleDict({"table": nn.Embedding(3, 2, sparse=True)}), None, engine=FakeEngine()
        )
    with pytest.raises(ValueError, match=r"weight has no shape yet"):
        DistributedDataParallel(nn.LazyLinear(3), None, engine=FakeEngine())
    with pytest.raises(ValueError, match="nothing to train"):
        DistributedDataParallel(nn.Tanh(), None, engine=FakeEngine())


@pytest.mark.parametrize("arguments", [{}, {"optimizers": []}])
def test_a_model_without_optimizers_is_refused_unless_the_script_says_that_it_has_none(
    arguments: dict[str, list[torch.optim.Optimizer]],
) -> None:
    with pytest.raises(ValueError, match=r"pass optimizers=\[optimizer\].*optimizers=None"):
        DistributedDataParallel(nn.Linear(1, 1), engine=FakeEngine(), **arguments)
    model = DistributedDataParallel(nn.Linear(1, 1), optimizers=None, engine=FakeEngine())
    assert model.optimizers == []


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        (lambda sgd: sgd, r"one SGD; pass optimizers=\[optimizer\]"),
        (lambda sgd: [0], r"contains 0, which is no optimizer"),  # device_ids of torch's
        (lambda sgd: [sgd, StepLR(sgd, 1)], "StepLR.* is no optimizer.*register_state"),
    ],
)
def test_what_is_no_list_of_optimizers_is_refused(
    optimizers: Callable[[torch.optim.Optimizer], Any], words: str
) -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=words):
        DistributedDataParallel(net, optimizers(torch.optim.SGD(net.parameters(), 0.1)), engine=FakeEngine())


def test_a_class_of_an_algorithm_is_no_algorithm() -> None:
    with pytest.raises(
        UnknownAlgorithmError, match=r"ByteGrad is a class; pass an object, ByteGrad\(\.\.\.\)"
    ):
        DistributedDataParallel(nn.Linear(1, 1), None, algorithm=ByteGrad, engine=FakeEngine())


def test_no_sync_covers_the_forward_as_in_torch() -> None:
    workers = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        communicator = w.engine.communicator()
        assert communicator is not None
        x = torch.full((3, 4), 1.0 + communicator.global_rank)
        with w.model.no_sync():
            w.model(x).sum().backward()
        assert not w.engine.pairs
        w.model(x).sum().backward()

    run_ranks(workers, act)
    for worker in workers:
        assert len(worker.engine.pairs) == 1
        assert torch.equal(worker.model.module.weight.grad, torch.full((2, 4), 2 * 4.5))


def test_a_failed_step_leaves_parameters_and_optimizer_as_they_were() -> None:
    world = in_process_world(2)
    worker = Worker(world[0])
    assert isinstance(world[1], InProcessCommunicator)
    world[1].lose("10.0.0.9")
    before = worker.weights()
    worker.train()
    assert worker.engine.step_failed
    assert torch.equal(worker.weights(), before)
    assert not worker.optimizer.state
    assert worker.engine.waits_before_step == 0


def test_only_the_last_micro_batch_steps() -> None:
    worker = Worker()
    before = worker.weights()
    worker.engine.current = NOT_LAST
    worker.train()
    assert torch.equal(worker.weights(), before)
    worker.engine.current = MicroBatch(0.5, True)
    worker.train()
    assert not torch.equal(worker.weights(), before)
    assert worker.engine.waits_before_step == 1


def test_a_failure_while_waiting_for_copies_holds_the_step_back() -> None:
    worker = Worker()
    before = worker.weights()

    def fails(final: bool = True) -> bool:
        worker.engine.failed = CollectiveFailed("x")
        return True

    worker.engine.takes_optimizer_step = fails  # type: ignore[method-assign]
    worker.train()
    assert torch.equal(worker.weights(), before)


def closing(worker: Worker, calls: list[int]) -> torch.Tensor:
    def closure() -> torch.Tensor:
        calls.append(1)
        worker.optimizer.zero_grad()
        loss: torch.Tensor = worker.model(torch.ones(3, 4)).sum()
        loss.backward()
        return loss

    loss: torch.Tensor = worker.optimizer.step(closure)
    return loss


def test_closures_run_once_and_are_judged_afterwards() -> None:
    calls: list[int] = []
    worker = Worker()
    before = worker.weights()
    worker.engine.current = NOT_LAST
    assert closing(worker, calls) is not None
    assert torch.equal(worker.weights(), before)
    worker.engine.current = MicroBatch(0.5, True)
    assert closing(worker, calls) is not None
    assert not torch.equal(worker.weights(), before)
    assert len(calls) == 2

    world = in_process_world(2)
    failing = Worker(world[0])
    assert isinstance(world[1], InProcessCommunicator)
    world[1].lose("10.0.0.9")
    before = failing.weights()
    closing(failing, calls)
    assert torch.equal(failing.weights(), before)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_follow_and_do_not_warn(scheduler_first: bool) -> None:
    engine = FakeEngine()
    inner = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(inner.parameters(), lr=1.0)

    def schedule() -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = schedule() if scheduler_first else None
        model = DistributedDataParallel(inner, optimizers=[optimizer], engine=engine)
        gate_optimizer(optimizer, engine)  # twice is harmless
        scheduler = scheduler or schedule()
        gate_scheduler(scheduler, engine)
        gate_scheduler(scheduler, engine)
        assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
        state = dict(scheduler.state_dict())
        for micro_batch, failed, rate in (
            (NOT_LAST, None, 1.0),
            (LAST, CollectiveFailed("x"), 1.0),
            (NOT_LAST, None, 1.0),
            (LAST, None, 0.5),
        ):
            engine.current, engine.failed = micro_batch, failed
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == rate
        engine.in_step, engine.current = False, NOT_LAST
        scheduler.step()  # between epochs
        assert optimizer.param_groups[0]["lr"] == 0.25
        scheduler.load_state_dict(state)
        assert state.keys() == schedule().state_dict().keys()


def test_a_scheduler_without_a_gate_does_not_warn_after_a_held_back_step() -> None:
    engine = FakeEngine()
    optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    gate_optimizer(optimizer, engine)  # the outermost, so torch's own note of the call is not taken
    engine.failed = CollectiveFailed("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()


def test_a_scaler_moves_once_a_step() -> None:
    engine = FakeEngine()
    inner = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(inner.parameters(), lr=1.0)
    model = DistributedDataParallel(inner, optimizers=[optimizer], engine=engine)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    gate_scaler(scaler, engine)
    gate_scaler(scaler, engine)
    before = inner.weight.detach().clone()

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.current = NOT_LAST
        train(torch.ones(1, 4))
        assert scaler.get_scale() == 8.0
        assert torch.equal(inner.weight, before)
        engine.current = MicroBatch(0.5, True)
        train(torch.ones(1, 4))
        assert scaler.get_scale() == 16.0
        torch.testing.assert_close(inner.weight, before - 1.0)
        stepped = inner.weight.detach().clone()
        # an overflow in one part spoils the sum, and only the sum is judged
        engine.current = NOT_LAST
        train(torch.full((1, 4), float("inf")))
        assert scaler.get_scale() == 16.0
        engine.current = MicroBatch(0.5, True)
        train(torch.ones(1, 4))
        assert scaler.get_scale() == 8.0
        assert torch.equal(inner.weight, stepped)
        engine.failed = CollectiveFailed("x")
        train(torch.ones(1, 4))
        assert scaler.get_scale() == 8.0
        assert torch.equal(inner.weight, stepped)


def test_a_wait_in_backward_lets_other_threads_run() -> None:
    """The session thread must be able to abort while the script's thread waits in autograd."""
    world = in_process_world(2)
    worker = Worker(world[0])
    timer = threading.Timer(0.05, lambda: world[0].abort("told by the agent"))
    timer.start()
    worker.train()
    timer.join(5.0)
    assert isinstance(worker.engine.failed, CollectiveFailed)
    assert "told by the agent" in str(worker.engine.failed)


def in_two_processes(script_name: str, tmp_path: Path, deadline_s: float) -> None:
    script = Path(__file__).with_name("communication") / script_name
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(global_rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for global_rank in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=deadline_s)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10.0)
    assert [p.returncode for p in processes] == [0, 0], "\n".join(outputs)


def test_the_same_as_torchs_ddp_in_two_processes(tmp_path: Path) -> None:
    """Both train the same net in the same processes: gradients agree, and ranks agree bit for bit."""
    in_two_processes("ddp_parity_rank.py", tmp_path, 150.0)
    first, second = (torch.load(tmp_path / f"ours-{r}.pt") for r in range(2))
    assert len(first) == len(second) > 10
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_scripts_use_around_ddp_works_as_with_torchs(tmp_path: Path) -> None:
    """Clipping, accumulation, autocast, GradScaler, torch.compile, checkpointing, shared, frozen, narrow and unused
    parameters: the same as torch's DDP after every step, and ranks equal bit for bit."""
    in_two_processes("ddp_features_rank.py", tmp_path, 200.0)
    first, second = (torch.load(tmp_path / f"features-{r}.pt") for r in range(2))
    assert len(first) == 9 and first.keys() == second.keys()
    for case, mine in first.items():
        if case != "input gradients":  # those are a rank's own
            both = zip(mine, second[case], strict=True)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in both), case
