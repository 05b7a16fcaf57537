"""What a boundary remembers of a sharded model, on two ranks that are the shards of one replica."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial

from bagua_core.elastic.heal.received_state import InPlace
from bagua_core.elastic.state import flat_tensors, state_codec
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.state.state_registry import StateRegistry
from bagua_core.fused_optimizer import FusedOptimizerError, fuse_optimizer
from bagua_core.model.sharded_tensors import Layout
from bagua_core.optimizers.repeated_closure import Before
from tests.core.elastic.sharded.models import OPTIMIZERS, Training, same
from tests.core.elastic.state.trainings import through_the_wire, wire_form


def check_a_failed_step_gives_parameters_back(rank: int) -> None:
    training = Training()
    training.train(2)
    objects = dict(training.model.named_parameters())
    before = training.tensors()
    training.registry.snapshot()
    training.model.first.weight.to_local().data.add_(1.0)  # no version counter sees it
    with torch.no_grad():
        training.model.scale.mul_(0.5)
    training.model.norm.running_mean.add_(1.0)
    training.registry.protect()
    with torch.no_grad():
        training.model.last.weight.add_(1.0)
    assert not same(training.tensors(), before)
    assert training.registry.roll_back() == ()
    assert same(training.tensors(), before)
    assert all(p is objects[n] for n, p in training.model.named_parameters())
    training.train(1)


def check_steps_that_go_on_get_parameters_and_optimizer_state_back(rank: int) -> None:
    for name in OPTIMIZERS:
        training, twin = Training(name), Training(name)
        for one in (training, twin):
            one.train(2)
        before = training.tensors()
        training.registry.snapshot()
        training.backward(9)
        training.registry.find_changed()
        training.registry.first_reduced()
        assert training.registry.boundary.is_kept and not training.registry.boundary.is_moved()
        training.optimizer.step()
        # foreach and fused steps on DTensors count no version; wait() of the step sees gated optimizers by their part
        assert training.registry.boundary.is_moved() or name.startswith("adamw"), name
        assert not same(training.tensors(), before)
        training.registry.roll_back()
        restored = training.tensors()
        assert all(torch.equal(restored[n], before[n]) for n in before if not n.startswith("buffer")), name
        assert same(restored, before), name
        for one in (training, twin):
            one.train(2, seed=5)
        assert same(training.tensors(), twin.tensors()), name


def check_a_captured_state_is_taken_over_bit_for_bit(rank: int) -> None:
    for name in OPTIMIZERS:
        source, target = Training(name, seed=1), Training(name, seed=2)
        source.train(3)
        objects = dict(target.model.named_parameters())
        target.registry.restore(through_the_wire(source.registry.capture()))
        assert same(source.tensors(), target.tensors()), name
        assert all(p is objects[n] and isinstance(p, DTensor) for n, p in target.model.named_parameters())
        for values in target.optimizer.state.values():
            sharded = [v for v in values.values() if isinstance(v, torch.Tensor) and v.dim()]
            assert sharded and all(isinstance(v, DTensor) for v in sharded)
        for one in (source, target):
            one.train(2, seed=7)
        assert same(source.tensors(), target.tensors()), name


def check_a_copy_beside_a_step_lands_in_place(rank: int) -> None:
    source, target = Training(seed=1), Training(seed=2)
    source.train(2)
    target.train(1)
    for one in (source, target):
        one.registry.snapshot()
    source.registry.find_changed()
    manifest, tensors = state_codec.encode(source.registry.bulk())
    declared: list[bool] = []
    received = InPlace(target.registry.bulk, lambda: declared.append(True))
    received.open(manifest, tensors.size_bytes)
    live = {t.data_ptr() for t in target.registry.parameters() if t.numel()}
    assert declared and live <= {t.data_ptr() for t in received._targets}
    run = torch.empty(tensors.size_bytes, dtype=torch.uint8)
    tensors.read(0, run)
    for at in range(0, run.numel(), 100):
        received.put(at, run[at : at + 100])
    rest = through_the_wire(source.registry.rest(at_resume_point=False))
    target.registry.restore_parts(received.state(), rest)
    assert same(source.tensors(), target.tensors())
    target.registry.roll_back()
    assert same(source.tensors(), target.tensors())


def check_gathered_parameters_are_not_the_state(rank: int) -> None:
    training = Training()
    training.train(1)
    before = training.tensors()
    training.registry.snapshot()
    with torch.no_grad():
        training.model(torch.ones(2, 3))
    training.model.train()
    assert not isinstance(training.model.scale, DTensor), "fully_shard resharded: the case does not arise"
    named = training.registry.models[0].lasting()
    assert all(isinstance(t, DTensor) for t in named.values())
    training.registry.roll_back()
    after = training.tensors()
    assert all(torch.equal(after[n], before[n]) for n in before)
    training.train(1)


def check_gathered_parameters_above_tensor_parallelism_are_not_the_state(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "tensor"))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["all"])
    registry = StateRegistry()
    registry.add_model(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    before = registry.models[0].lasting()
    with torch.no_grad():
        model(torch.ones(2, 3))
    live = dict(model.named_parameters())
    assert not any(t is p for t in before.values() for p in live.values()), (
        "resharded: the case does not arise"
    )
    assert all(t is before[n] for n, t in registry.models[0].lasting().items())


def check_gradients_of_several_steps_are_rolled_back(rank: int) -> None:
    training = Training()
    training.backward(1)
    kept = {n: p.grad.to_local().clone() for n, p in training.model.named_parameters()}
    source = through_the_wire(training.registry.capture())
    training.registry.snapshot()
    training.registry.backward_begins()
    training.backward(2)
    assert any(not torch.equal(p.grad.to_local(), kept[n]) for n, p in training.model.named_parameters())
    training.registry.roll_back()
    training.registry.roll_back_gradients()
    assert all(torch.equal(p.grad.to_local(), kept[n]) for n, p in training.model.named_parameters())
    other = Training(seed=3)
    other.registry.restore(source)
    assert all(torch.equal(p.grad.to_local(), kept[n]) for n, p in other.model.named_parameters())
    training.backward(4)
    other.optimizer.step()


def check_digests_and_sizes_are_of_the_local_tensors(rank: int) -> None:
    training = Training()
    training.train(1)
    parameters = training.registry.parameters()
    assert sum(p.numel() for p in parameters) == sum(
        p.to_local().numel() for p in training.model.parameters()
    )
    digest = flat_tensors.digest(parameters)
    training.registry.restore(through_the_wire(training.registry.capture()))
    assert flat_tensors.digest(training.registry.parameters()) == digest
    digests: list[int] = [0, 0]
    dist.all_gather_object(digests, digest)
    assert digests[0] != digests[1]
    state = CommittedState()
    state.registry = training.registry
    # parameters and AdamW's three moments, all float32, the step counts, and the buffers
    buffers = sum(b.nbytes for b in training.model.buffers())
    assert state.size_bytes == 4 * sum(p.nbytes for p in parameters) + 4 * len(parameters) + buffers


def check_the_fingerprint_is_the_same_on_all_shards(rank: int) -> None:
    own = Training().registry.fingerprint()
    prints: list[dict[str, str]] = [{}, {}]
    dist.all_gather_object(prints, own)
    assert prints[0] == prints[1]
    plain = Training(sharded=False).registry.fingerprint()
    assert "sharding" in own and "sharding" not in plain
    assert own["model"] == plain["model"] and own["model"].startswith("39 parameters")
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]
    assert Training(mesh=alone).registry.fingerprint()["sharding"] != own["sharding"]


def check_nothing_communicates(rank: int) -> None:
    training = Training()
    training.train(2)
    with CommDebugMode() as communication:
        registry = training.registry
        registry.snapshot()
        registry.backward_begins()
        registry.find_changed()
        registry.first_reduced()
        registry.protect()
        registry.roll_back()
        registry.roll_back_gradients()
        state = through_the_wire(registry.capture())
        registry.restore(state)
        registry.restore_parts(
            through_the_wire(registry.bulk()), through_the_wire(registry.rest(at_resume_point=True))
        )
        registry.fingerprint()
        registry.check_travels()
        wire_form(registry.capture_for_checkpoint(at_resume_point=True))
        Before(training.optimizer).put_back()
    assert communication.get_total_counts() == 0
    training.train(1)


def check_other_layouts_are_refused(rank: int) -> None:
    training = Training()
    training.train(1)
    state = through_the_wire(training.registry.capture())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    other = Training(mesh=mesh)
    try:
        other.registry.restore(state)
    except ValueError as error:
        assert "no model here has that mesh" in str(error)
    else:
        raise AssertionError("a state of another mesh was taken")
    partial = DTensor.from_local(
        torch.ones(2), training.model.scale.device_mesh, [Partial()], run_check=False
    )
    try:
        state_codec.encode({"sum": partial})
    except state_codec.CannotTravel as error:
        assert "state['sum'] is a tensor with the placement P(sum)" in str(error)
    else:
        raise AssertionError("a partial sum was encoded")
    layout = Layout.of(training.model.first.weight)
    assert Layout.from_json(layout.to_json()) == layout and layout.placements == ("S(0)",)


def check_fused_optimizers_refuse_sharded_parameters(rank: int) -> None:
    training = Training()
    try:
        fuse_optimizer(training.optimizer)
    except FusedOptimizerError as error:
        assert "fully_shard" in str(error)
    else:
        raise AssertionError("fuse_optimizer took sharded parameters")


def check_registered_objects_may_hold_sharded_tensors(rank: int) -> None:
    class Average:
        """As an average of weights keeps it."""

        def __init__(self, training: Training) -> None:
            self.weights = {n: p.detach().clone() for n, p in training.model.named_parameters()}

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self.weights

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.weights = state

    source, target = Training(seed=1), Training(seed=2)
    averages = Average(source), Average(target)
    registries: list[StateRegistry] = [source.registry, target.registry]
    for registry, average in zip(registries, averages, strict=True):
        registry.register("average", average)
    target.registry.restore(through_the_wire(source.registry.capture()))
    for name, weight in averages[1].weights.items():
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.to_local(), averages[0].weights[name].to_local())
    target.registry.snapshot()
    averages[1].weights["scale"].add_(1.0)
    target.registry.roll_back()
    assert torch.equal(averages[1].weights["scale"].to_local(), averages[0].weights["scale"].to_local())
