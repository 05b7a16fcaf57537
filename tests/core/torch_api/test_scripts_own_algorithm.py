"""Algorithms that a script writes in the original's way: what of them runs, and what is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bagua_core.algorithms import UnknownAlgorithmError
from bagua_core.communication.communicator import Communicator
from bagua_core.torch_api.algorithms import (
    Algorithm,
    AlgorithmImpl,
    bytegrad,
    decentralized,
    gradient_allreduce,
)
from bagua_core.torch_api.algorithms.own import OwnExchange
from bagua_core.torch_api.errors import UnsupportedAlgorithmError
from bagua_core.torch_api.wrapping import attach
from tests.core.communication.worlds import in_process_world, run_ranks, seeded
from tests.core.torch_api.scripts_in_threads import Net, batches, script, weights


class Halves(AlgorithmImpl):
    """Halves the gradients, averages them, doubles them again. What was called is noted."""

    def __init__(self, process_group: Any, **options: Any) -> None:
        super().__init__(process_group)
        self.options = options
        self.calls: list[str] = []
        self.resets = 0

    def need_reset(self) -> bool:
        self.calls.append("need_reset")
        return self.resets > 0

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        self.calls.append(f"init_operations {bucket.name}")

        def halve(name: str) -> None:
            assert name == bucket.name
            bucket.flattened_tensor().mul_(0.5)

        def double(name: str) -> None:
            for tensor in bucket.tensors:
                tensor.grad.mul_(2.0)

        bucket.append_python_op(halve, group=self.process_group)
        bucket.append_centralized_synchronous_op(group=self.process_group, **self.options)
        bucket.append_python_op(double)

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Any:
        return lambda inputs: self.calls.append(f"forward {len(inputs)}")

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda: self.calls.append("post_backward")

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Any:
        return lambda optimizer: self.calls.append(f"post_step {type(optimizer).__name__}")


class Declared(Algorithm):
    """made: what it became for each model."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: list[Halves] = []

    def reify(self, process_group: Any) -> Halves:
        self.made.append(Halves(process_group, **self.options))
        return self.made[-1]


class Run:
    def __init__(self, algorithm: Any, communicator: Communicator | None = None, build: Any = Net) -> None:
        self.engine, self.script = script(communicator)
        self.model = seeded(build)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.handle = attach(self.script, self.model, [self.optimizer], algorithm)

    def train(self, xs: list[torch.Tensor]) -> None:
        for x in xs:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), x[:, :2]).backward()
            self.optimizer.step()


def trained(algorithm: Any, algorithms: int = 2, **options: Any) -> list[Run]:
    runs = [Run(algorithm(**options), c) for c in in_process_world(2)]
    run_ranks(
        list(zip(runs, [batches(3, 1), batches(3, 2)], strict=True)), lambda pair: pair[0].train(pair[1])
    )
    return runs


def test_its_operations_run_on_the_buckets_in_order() -> None:
    own = trained(Declared)
    built_in = trained(gradient_allreduce.GradientAllReduceAlgorithm)
    assert torch.equal(weights(own[0].model), weights(own[1].model))
    torch.testing.assert_close(weights(own[0].model), weights(built_in[0].model))


def test_without_average_it_is_the_sum() -> None:
    own = trained(Declared, average=False)
    built_in = trained(gradient_allreduce.GradientAllReduceAlgorithm, average=False)
    torch.testing.assert_close(weights(own[0].model), weights(built_in[0].model))


def test_compression_is_that_of_bytegrad() -> None:
    own = trained(Declared, scattergather=True, compression="MinMaxUInt8")
    assert torch.equal(weights(own[0].model), weights(own[1].model))


def test_alone_the_operations_of_the_script_run_all_the_same() -> None:
    own, x = Run(Declared()), batches(2)
    own.train(x)
    plain = Run(gradient_allreduce.GradientAllReduceAlgorithm())
    plain.train(x)
    torch.testing.assert_close(weights(own.model), weights(plain.model))


def test_hooks_are_called_at_their_moments() -> None:
    run = Run(Declared())
    (impl,) = [run.handle._own.impl]  # type: ignore[union-attr]
    assert isinstance(impl, Halves) and impl.calls == ["init_operations 0"]
    impl.calls.clear()
    run.train(batches(1))
    assert impl.calls == ["forward 1", "need_reset", "post_backward", "post_step SGD"]


def test_a_stage_that_ends_sets_operations_up_anew() -> None:
    run = Run(Declared())
    impl = run.handle._own.impl  # type: ignore[union-attr]
    assert isinstance(impl, Halves)
    impl.resets = 1
    run.train(batches(2))
    assert impl.calls.count("init_operations 0") == 3
    assert len(run.handle._own.bagua_buckets[0].operations) == 3  # type: ignore[union-attr]


def test_one_declaration_serves_several_models() -> None:
    algorithm = Declared()
    runs = [Run(algorithm), Run(algorithm)]
    for run in runs:
        run.train(batches(1))
    assert len(algorithm.made) == 2
    assert all("post_backward" in impl.calls for impl in algorithm.made)


def test_a_failed_step_reaches_neither_hooks_nor_parameters() -> None:
    run = Run(Declared())
    impl = run.handle._own.impl  # type: ignore[union-attr]
    before = weights(run.model)
    loss = run.model(batches(1)[0]).sum()
    run.engine.lose_the_step()
    loss.backward()
    run.optimizer.step()
    assert "post_backward" not in impl.calls and "post_step SGD" not in impl.calls
    assert torch.equal(weights(run.model), before)


def test_a_collective_of_the_script_that_fails_fails_the_step() -> None:
    class Asks(AlgorithmImpl):
        def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
            # as bagua.allreduce_inplace does when a peer is gone
            bucket.append_python_op(lambda _: run.engine.lose_the_step())
            bucket.append_python_op(lambda _: pytest.fail("the step had failed"))

    class Asking(Algorithm):
        def reify(self, process_group: Any) -> AlgorithmImpl:
            return Asks(process_group)

    run = Run(Asking(), in_process_world(1)[0])
    before = weights(run.model)
    run.train(batches(1))
    assert len(run.engine.failures) == 1 and torch.equal(weights(run.model), before)


def test_a_subclass_of_a_built_in_one_runs_through_its_hooks() -> None:
    class Mine(gradient_allreduce.GradientAllReduceAlgorithm):
        def reify(self, process_group: Any) -> AlgorithmImpl:
            return Halves(process_group)

    run = Run(Mine())
    assert isinstance(run.handle.exchange, OwnExchange)
    assert not isinstance(Run(bytegrad.ByteGradAlgorithm()).handle.exchange, OwnExchange)


def test_several_buckets() -> None:
    run = Run(Declared(), build=lambda: nn.Sequential(*[nn.Linear(600, 600) for _ in range(2)]))
    buckets = run.handle._own.bagua_buckets  # type: ignore[union-attr]
    assert [b.name for b in buckets] == ["0", "1"]
    assert sum(b.bytes() for b in buckets) == 4 * sum(p.numel() for p in run.model.parameters())


def overriding(name: str) -> Algorithm:
    kind = type("Impl", (Halves,), {name: lambda self, *_: None})

    class Overriding(Algorithm):
        def reify(self, process_group: Any) -> AlgorithmImpl:
            impl: AlgorithmImpl = kind(process_group)
            return impl

    return Overriding()


@pytest.mark.parametrize("name", ["init_tensors", "tensors_to_buckets", "init_backward_hook"])
def test_what_the_runtime_decides_can_not_be_overridden(name: str) -> None:
    with pytest.raises(UnsupportedAlgorithmError, match=rf"Impl.{name}: .*docs/algorithms.md"):
        Run(overriding(name))


@pytest.mark.parametrize(
    "operation",
    [
        "append_decentralized_synchronous_op",
        "append_low_precision_decentralized_synchronous_op",
        "append_asynchronous_model_average_op",
    ],
)
def test_operations_on_weights_are_refused(operation: str) -> None:
    class Weights(AlgorithmImpl):
        def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
            getattr(bucket, operation)(hierarchical=True)

    class Weighing(Algorithm):
        def reify(self, process_group: Any) -> AlgorithmImpl:
            return Weights(process_group)

    with pytest.raises(UnsupportedAlgorithmError, match=rf"{operation}: weights are shared there"):
        Run(Weighing())


def test_a_bucket_without_operations_is_refused() -> None:
    class Forgets(Algorithm):
        def reify(self, process_group: Any) -> AlgorithmImpl:
            return type("Impl", (AlgorithmImpl,), {"init_operations": lambda *_: None})(process_group)

    with pytest.raises(UnsupportedAlgorithmError, match="appended nothing to bucket 0"):
        Run(Forgets())
    with pytest.raises(UnsupportedAlgorithmError, match="has no hooks to build on"):
        decentralized.DecentralizedAlgorithm().reify(None)  # type: ignore[arg-type]


def test_bad_arguments_of_operations() -> None:
    for options, words in (
        ({"compression": "Zip"}, "'Zip' is unknown"),
        ({"compression": "MinMaxUInt8"}, "needs scattergather=True"),
    ):
        with pytest.raises(ValueError, match=words):
            Run(Declared(**options))


def test_declarations_are_found_by_name() -> None:
    found = Algorithm.init("gradient_allreduce", average=False)
    assert isinstance(found, gradient_allreduce.GradientAllReduceAlgorithm) and not found.average
    for name in ("bytegrad", "decentralized", "low_precision_decentralized", "async"):
        core = Algorithm.init(name).core()
        assert core is not None and core.name == name
    with pytest.raises(UnknownAlgorithmError, match=r"'byte'\) is unknown; use one of async, bytegrad"):
        Algorithm.init("byte")


def test_a_script_says_that_its_replicas_differ() -> None:
    class Apart(Declared):
        equal_states = False

    assert Run(Declared()).handle.parallel.equal_states
    assert not Run(Apart()).handle.parallel.equal_states
