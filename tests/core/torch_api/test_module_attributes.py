"""The attributes of a wrapped model, and the effect of wrapping it again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import bagua_core.torch_api as bagua
from bagua_core.torch_api import algorithms, data_parallel
from bagua_core.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua_core.torch_api.errors import UnsupportedAlgorithmError
from bagua_core.torch_api.wrapping import attach, find_wrapped, release
from tests.core.communication.worlds import in_process_world, run_ranks, seeded
from tests.core.torch_api.scripts_in_threads import Net, batches, script, weights
from tests.core.torch_api.test_wrapping import Run, plain, step
from tests.lab.launched import launch

BYTES = algorithms.bytegrad.ByteGradAlgorithm


def test_an_unwrapped_model_has_none() -> None:
    model = Net()
    assert model.bagua_module_name is None
    for name in ("bagua_algorithm", "bagua_buckets", "bagua_optimizers"):
        assert getattr(model, name) is None
    model.bagua_module_name = "mine"
    assert model.bagua_module_name == "mine"


def test_a_wrapped_model_tells_of_it() -> None:
    declared = BYTES()
    run = Run(algorithm=declared)
    model: Any = run.model
    assert model.bagua_algorithm is declared
    assert model.bagua_optimizers == [run.optimizer]
    assert model.bagua_module_name.startswith("Net_")
    held = [id(p) for bucket in model.bagua_buckets for p in bucket.tensors]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    with pytest.raises(UnsupportedAlgorithmError, match="takes no further operations"):
        model.bagua_buckets[0].append_python_op(print)


def test_so_does_the_wrapper_of_torchs_kind() -> None:
    _, one = script()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel: Any = data_parallel.DistributedDataParallel(
        model, optimizers=[optimizer], algorithm=BYTES(), script=one
    )
    assert isinstance(parallel.bagua_algorithm, BYTES) and parallel.bagua_optimizers == [optimizer]
    assert parallel.bagua_buckets and isinstance(parallel.bagua_module_name, str)


class Impl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.append_centralized_synchronous_op()


class Mine(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return Impl(process_group)


def test_of_an_algorithm_of_ones_own_it_is_the_implementation() -> None:
    model: Any = Run(algorithm=Mine()).model
    assert isinstance(model.bagua_algorithm, Impl)
    assert len(model.bagua_buckets[0].operations) == 1


def test_buckets_are_as_large_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Any = Run().model
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "64")
    cut: Any = Run().model
    assert len(whole.bagua_buckets) == 1 < len(cut.bagua_buckets)


def test_copies_and_pickles_come_without() -> None:
    run = Run()
    for other in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        assert find_wrapped(other) is None and other.bagua_algorithm is None


def test_torch_compiles_and_scripts_modules_as_before() -> None:
    model, x = seeded(Net).eval(), batches(1)[0]
    expected = model(x)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x), expected)
    assert graphs
    torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
    torch.testing.assert_close(torch.jit.script(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))(x).shape, (6, 2))


# -- again, with another algorithm


def wrap_again(run: Run, algorithm: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
    release(run.model)
    run.handle = attach(run.script, run.model, [optimizer or run.optimizer], algorithm)


def test_alone_training_goes_on_as_if_nothing_happened() -> None:
    run, xs = Run(), batches(6)
    run.train(xs[:3])
    wrap_again(run, BYTES())
    model: Any = run.model
    assert isinstance(model.bagua_algorithm, BYTES) and model.no_sync
    run.train(xs[3:])
    assert torch.equal(weights(run.model), weights(plain(xs)))
    assert run.engine.committed == 6 and len(run.engine.registry.models) == 1


def test_a_second_optimizer_takes_the_firsts_place() -> None:
    run, xs = Run(), batches(4)
    run.train(xs[:2])
    other = torch.optim.SGD(run.model.parameters(), lr=0.01)
    wrap_again(run, BYTES(), other)
    assert run.engine.registry.optimizers == [other]
    for x in xs[2:]:
        step(run.model, other, x)
    assert run.engine.committed == 4


def test_in_the_middle_of_a_step_it_is_refused() -> None:
    run = Run()
    run.model(batches(1)[0]).sum().backward()
    with pytest.raises(ValueError, match=r"wrap it with another algorithm after optimizer\.step"):
        release(run.model)


def test_where_workers_may_join_it_is_refused() -> None:
    run = Run()
    run.script.world.elastic = True
    with pytest.raises(ValueError, match="only a plain loop"):
        release(run.model)


def test_the_former_wrapper_refuses_to_go_on() -> None:
    _, one = script()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = data_parallel.DistributedDataParallel(model, optimizers=[optimizer], script=one)
    second = data_parallel.DistributedDataParallel(model, optimizers=[optimizer], script=one)
    with pytest.raises(RuntimeError, match="was wrapped again since"):
        first(batches(1)[0])
    step(second, optimizer, batches(1)[0])


def test_two_workers_change_together() -> None:
    runs = [Run(c) for c in in_process_world(2)]
    halves = [batches(6, seed) for seed in (1, 2)]

    def train(pair: tuple[Run, list[torch.Tensor]]) -> None:
        one, xs = pair
        one.train(xs[:3])
        wrap_again(one, algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
        one.train(xs[3:])

    run_ranks(list(zip(runs, halves, strict=True)), train)
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))
    assert not torch.equal(weights(runs[0].model), weights(seeded(Net)))


SWITCHES = """
import torch
from torch import nn
import bagua_core.torch_api as bagua
from bagua_core.torch_api.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam
from bagua_core.torch_api.data_parallel import DistributedDataParallel as DDP

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
layers = nn.Linear(2, 10, bias=False), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4), nn.Softmax(1)
model = nn.Sequential(*layers)
in_place = nn.Linear(2, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
second = torch.optim.SGD(in_place.parameters(), lr=0.01)
names = "bytegrad", "decentralized", "gradient_allreduce", "qadam", "async", "low_precision_decentralized", "last"
for name in names:
    if name == "bytegrad":
        algorithm = bytegrad.ByteGradAlgorithm(hierarchical=False)
    elif name == "decentralized":
        algorithm = decentralized.DecentralizedAlgorithm(hierarchical=False)
    elif name == "qadam":
        optimizer = q_adam.QAdamOptimizer(model.parameters(), warmup_steps=5)
        algorithm = q_adam.QAdamAlgorithm(optimizer, hierarchical=False)
    elif name == "async":
        algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=20)
    elif name == "low_precision_decentralized":
        algorithm = decentralized.LowPrecisionDecentralizedAlgorithm(hierarchical=False)
    else:
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
    ddp = DDP(model, optimizers=[optimizer], algorithm=algorithm, process_group=bagua.new_group([0, 1]))
    assert ddp.bagua_algorithm is algorithm is model.bagua_algorithm
    if name == "async":
        ddp.bagua_algorithm.resume(ddp)
        ddp.bagua_algorithm.resume(ddp)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(torch.randn(4, 2)), torch.randn(4, 4)).backward()
        optimizer.step()
    if name == "async":
        ddp.bagua_algorithm.abort(ddp)
        ddp.bagua_algorithm.abort(ddp)
    if name in ("bytegrad", "decentralized"):
        in_place.with_bagua([second], name)
        for _ in range(3):
            second.zero_grad()
            in_place(torch.randn(4, 2)).sum().backward()
            second.step()
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
both = torch.zeros(2, flat.numel())
bagua.allgather(flat, both)
assert torch.equal(both[0], both[1]), "gradient_allreduce came last, so both are equal"
try:
    model.with_bagua([optimizer], algorithm, process_group=bagua.new_group([0]))
except ValueError as error:
    assert "trained by all workers of the job" in str(error)
else:
    raise AssertionError("nothing was said")
print("rank", bagua.get_rank(), "went through all")
"""


def test_two_workers_of_a_job_go_through_all_algorithms(tmp_path: Any) -> None:
    file = tmp_path / "switches.py"
    file.write_text(SWITCHES)
    ended = launch("--standalone", "--nproc-per-node", "2", str(file))
    assert ended.returncode == 0, ended.said
    assert "rank 0 went through all" in ended.said and "rank 1 went through all" in ended.said


def test_the_names_are_of_every_module() -> None:
    assert all(hasattr(nn.Module, name) for name in ("with_bagua", "bagua_algorithm", "bagua_buckets"))
    assert bagua.data_parallel is data_parallel


LOST = """
import os, signal
import torch
import bagua_core.torch_api as bagua
from bagua_core.torch_api.algorithms import bytegrad, gradient_allreduce

bagua.init_process_group()
slot = bagua.get_local_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, algorithm in enumerate((gradient_allreduce.GradientAllReduceAlgorithm(), bytegrad.ByteGradAlgorithm())):
    if number and slot:
        os.kill(os.getpid(), signal.SIGKILL)
    model.with_bagua([optimizer], algorithm)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
print("slot", slot, "ends in a world of", bagua.get_world_size())
"""


def test_a_worker_that_is_lost_while_the_others_change_is_gone_without(tmp_path: Any) -> None:
    file = tmp_path / "lost.py"
    file.write_text(LOST)
    ended = launch("--standalone", "--nproc-per-node", "2", str(file))
    assert ended.returncode == 0, ended.said
    assert "slot 0 ends in a world of 1" in ended.said, ended.said
    assert "worker in slot 1 ended: killed by SIGKILL" in ended.said
