"""What ElasticAccelerator refuses, and what it leaves alone: in one process, a world of one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bagua_core as bagua
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.state_codec import CannotTravel
from bagua_core.elastic.step import runtime
from bagua_core.integrations.huggingface.refusals import METHODS, check_arguments
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob
from tests.lab.wait import HANG_S


@pytest.fixture
def accelerator() -> Iterator[Any]:
    from bagua_core.integrations.huggingface import ElasticAccelerator

    yield ElasticAccelerator(cpu=True)
    bagua.shutdown()


NUMBERS = TensorDataset(torch.arange(10.0))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        ({"fsdp_plugin": object()}, {}, "fsdp_plugin"),
        ({"deepspeed_plugin": object()}, {}, "deepspeed_plugin"),
        ({"dynamo_backend": "inductor"}, {}, "dynamo_backend"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP"),
    ],
)
def test_plugins_are_refused(arguments: dict[str, Any], environment: dict[str, str], named: str) -> None:
    with pytest.raises(UnsupportedInElasticJob, match=named):
        check_arguments(arguments, environment)


def test_dispatched_batches_are_refused() -> None:
    from accelerate.utils import DataLoaderConfiguration

    with pytest.raises(UnsupportedInElasticJob, match="dispatch_batches"):
        check_arguments({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, {})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_are_refused_with_the_alternative(accelerator: Any, method: str) -> None:
    with pytest.raises(UnsupportedInElasticJob, match=method) as caught:
        getattr(accelerator, method)("argument")
    assert METHODS[method] in str(caught.value)


def test_a_model_without_its_optimizer_is_refused(accelerator: Any) -> None:
    with pytest.raises(UnsupportedInElasticJob, match="Linear without its optimizer"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedInElasticJob, match="prepare_model"):
        accelerator.prepare_model(torch.nn.Linear(2, 2))


def test_a_frozen_model_is_returned_unwrapped(accelerator: Any) -> None:
    teacher = torch.nn.Linear(2, 2).requires_grad_(False)
    assert accelerator.prepare(teacher) is teacher


def test_a_stream_that_makes_batches_itself_is_refused(accelerator: Any) -> None:
    with pytest.raises(UnsupportedInElasticJob, match="Stream, a stream; give the DataLoader a batch_size"):
        accelerator.prepare(DataLoader(Stream(), batch_size=None))


def test_loader_workers_of_a_stream_are_refused(accelerator: Any) -> None:
    with pytest.raises(ValueError, match="num_workers=2: Stream is a stream"):
        accelerator.prepare(DataLoader(Stream(), batch_size=2, num_workers=2))


def test_the_batch_size_is_that_of_the_job(accelerator: Any) -> None:
    loader = accelerator.prepare(DataLoader(NUMBERS, batch_size=4))
    assert loader.global_batch_size == 4 and len(loader) == 3


@pytest.mark.parametrize(
    "loader", [DataLoader(NUMBERS, batch_size=4), DataLoader(NUMBERS, batch_sampler=[[0, 1]])]
)
def test_batches_of_an_evaluation_are_on_the_device(accelerator: Any, loader: Any) -> None:
    _, evaluation = accelerator.prepare(DataLoader(NUMBERS, batch_size=4), loader)
    accelerator.state.device = torch.device("meta")
    assert next(iter(evaluation))[0].device.type == "meta"
    [_, unplaced] = accelerator.prepare(torch.nn.Identity(), loader, device_placement=[True, False])
    assert next(iter(unplaced))[0].device.type == "cpu"
    accelerator.device_placement = False
    assert next(iter(accelerator.prepare(loader)))[0].device.type == "cpu"


def test_a_loader_that_is_not_divided_keeps_its_length(accelerator: Any) -> None:
    loader = DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]])
    _, evaluation = accelerator.prepare(DataLoader(NUMBERS, batch_size=4), loader)
    assert len(evaluation) == 2 and evaluation.batch_sampler is loader.batch_sampler


def test_a_train_loader_leaves_batches_where_they_are_if_asked_to(accelerator: Any) -> None:
    loader = accelerator.prepare_data_loader(DataLoader(NUMBERS, batch_size=4), device_placement=False)
    accelerator.state.device = torch.device("meta")
    assert loader._placed(torch.ones(1)).device.type == "cpu"


def test_a_loop_over_a_range_of_epochs_is_refused(accelerator: Any) -> None:
    loader = accelerator.prepare(DataLoader(NUMBERS, batch_size=4))
    with pytest.raises(UnsupportedInElasticJob, match=r"loader\.epochs\(count\)"):
        next(iter(loader))


def test_a_scheduler_is_part_of_the_state_also_after_free_memory(accelerator: Any) -> None:
    for number in range(2):
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator.prepare(module, optimizer, scheduler)
        accelerator.prepare(torch.nn.Identity())
        registered = runtime.engine().state.registry.registered
        assert registered[f"huggingface.scheduler{number}"] is scheduler
        assert len(registered) == number + 1
        accelerator.free_memory()


def test_the_model_is_unwrapped(accelerator: Any) -> None:
    module = torch.nn.Linear(2, 2)
    model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert isinstance(model, bagua.DistributedDataParallel)
    assert accelerator.unwrap_model(model) is module


def test_collectives_keep_shapes(accelerator: Any) -> None:
    assert accelerator.reduce(torch.tensor([2, 4]), "mean").tolist() == [2.0, 4.0]
    assert accelerator.reduce({"a": torch.tensor(3)}, "sum")["a"].dtype is torch.int64
    assert accelerator.gather(torch.tensor(1.0)).shape == (1,)
    assert accelerator.gather(torch.ones(3, 2)).shape == (3, 2)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What a gather finds, by rank."""
    from bagua_core.integrations.huggingface import elastic_accelerator

    found: list[torch.Tensor] = []
    monkeypatch.setattr(elastic_accelerator, "gather_unequal", lambda tensor, is_filler: found)
    return found


@pytest.mark.parametrize("own", [(4, 10), (4, 20), (0, 20)])
def test_rows_of_unequal_sizes_are_not_joined(
    accelerator: Any, parts: list[torch.Tensor], own: tuple[int, int]
) -> None:
    parts += [torch.ones(4, 10), torch.ones(4, 20)]
    with pytest.raises(
        UnsupportedInElasticJob, match=r"\[4, 10\], \[4, 20\].*pad_across_processes\(tensor, dim=1\)"
    ):
        accelerator.gather(torch.ones(own))


def test_tensors_get_the_largest_size_of_all_workers(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(2, 3)
    monkeypatch.setattr(bagua, "allreduce", lambda sizes, op: sizes + 2)  # another worker has a larger one
    for dim in (1, -1):
        padded = accelerator.pad_across_processes({"a": tensor}, dim=dim, pad_index=-100)["a"]
        assert padded.tolist() == [[1, 1, 1, -100, -100]] * 2
    first = accelerator.pad_across_processes(tensor, dim=1, pad_first=True)
    assert first.tolist() == [[0, 0, 1, 1, 1]] * 2
    for dim in (2, -3):
        assert accelerator.pad_across_processes(tensor, dim=dim) is tensor, "it has no such dimension"


OBJECTS = ["a", {"score": 0.5, "words": (1, None)}, torch.tensor([1, 2])]


def test_objects_of_all_workers_are_gathered(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua_core.integrations import worker_values

    def asked(request: Any) -> Any:
        others = [state_codec.to_bytes([False, part]) for part in (["of rank 0"], [])]
        return [torch.cat([*others, request.tensor])]

    monkeypatch.setattr(worker_values, "ask", asked)
    for given in (OBJECTS, tuple(OBJECTS)):
        [first, *own] = accelerator.gather_for_metrics(given)
        assert first == "of rank 0" and own[:2] == OBJECTS[:2] and torch.equal(own[2], OBJECTS[2])
    for given in ([], [[], []], ([], [])):
        [first, *_] = accelerator.gather_for_metrics(given)
        assert first == "of rank 0", "it has no share of this batch"
    [_, own] = accelerator.gather_for_metrics([torch.ones(2)], use_gather_object=True)
    assert own.tolist() == [1, 1]


def test_objects_are_gathered_as_a_list(accelerator: Any) -> None:
    assert accelerator.gather_for_metrics(["a"]) == ["a"]
    for data in ({"x": torch.ones(2), "id": "a"}, "abc", 1.5, None):
        with pytest.raises(
            UnsupportedInElasticJob, match=r"gather_for_metrics\(\) gathers objects as a list"
        ):
            accelerator.gather_for_metrics(data)
    assert accelerator.gather_for_metrics({}) == {}
    with pytest.raises(CannotTravel, match="set, which cannot travel"):
        accelerator.gather_for_metrics([{1, 2}])


@pytest.mark.parametrize(
    ("method", "data", "named"),
    [
        ("gather", ["a"], "str"),
        ("gather", {"x": torch.ones(2), "y": None}, "NoneType"),
        ("reduce", 1.0, "float"),
        ("reduce", (torch.ones(2), [1]), "int"),
        ("pad_across_processes", "a", "str"),
    ],
)
def test_values_that_are_no_tensors_are_refused(accelerator: Any, method: str, data: Any, named: str) -> None:
    """Returned as they are, each worker's would differ."""
    with pytest.raises(UnsupportedInElasticJob, match=rf"{method}\(\) takes tensors, .*not {named}"):
        getattr(accelerator, method)(data)


def test_values_of_fillers_are_left_out_unless_they_are_of_an_evaluation(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation in the loop body, behind the optimizer, is of samples also on a worker whose batch is a filler."""
    from bagua_core.integrations.huggingface import elastic_accelerator

    engine = SimpleNamespace(
        in_step=True, has_fillers=True, micro_batch=MicroBatch(0.0, True), joining=False, plan=None
    )
    asked: list[bool] = []

    def noted(tensor: torch.Tensor, is_filler: bool) -> list[torch.Tensor]:
        asked.append(is_filler)
        return [tensor]

    _, evaluation = accelerator.prepare(DataLoader(NUMBERS, batch_size=4), DataLoader(NUMBERS, batch_size=4))
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(elastic_accelerator, "gather_unequal", noted)
    monkeypatch.setattr(elastic_accelerator, "mean", lambda tensor, is_filler: noted(tensor, is_filler)[0])
    monkeypatch.setattr(accelerator, "_follow_ranks", lambda: None)
    monkeypatch.setattr(type(accelerator), "process_index", 0)
    monkeypatch.setattr(type(accelerator), "num_processes", 1)
    accelerator.gather(torch.ones(2))
    accelerator.reduce(torch.ones(2), "mean")
    monkeypatch.setattr(bagua, "allreduce", lambda own: own + 3)
    assert accelerator.reduce(torch.ones(2), "sum").tolist() == [3.0, 3.0], "of the other worker's samples"
    list(evaluation)
    accelerator.gather_for_metrics(torch.ones(2))
    accelerator.reduce(torch.ones(2), "mean")
    assert accelerator.reduce(torch.ones(2), "sum").tolist() == [4.0, 4.0]
    engine.micro_batch = MicroBatch(0.0, True)
    accelerator.gather(torch.ones(2))
    assert asked == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("with_epoch", "updates"),
    [(True, [False, False, True] * 3), (False, [False, False, False, True] * 2 + [False])],
)
def test_a_group_of_batches_ends_with_its_epoch_unless_told_otherwise(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch, with_epoch: bool, updates: list[bool]
) -> None:
    """Epochs of three batches are shorter than a group of four."""
    settings = {"num_steps": 4, "sync_with_dataloader": with_epoch}
    monkeypatch.setitem(vars(accelerator.gradient_state), "plugin_kwargs", settings)
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(module, optimizer, DataLoader(NUMBERS, batch_size=4))
    found = []
    for _ in loader.epochs(3):
        for [x] in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x[:, None]).sum())
                optimizer.step()
                optimizer.zero_grad()
                found.append(accelerator.sync_gradients)
    assert found == updates


def test_the_core_imports_nothing_of_accelerate() -> None:
    words = "import sys, bagua_core; sys.exit('accelerate' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], timeout=HANG_S).returncode == 0
