"""Four shards, some of them empty, read what two wrote; a mesh of two dimensions; torch's own reader."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bagua_core.checkpoint import dcp_reader
from bagua_core.elastic.checkpoint.restore import CheckpointMismatch
from bagua_core.elastic.state.state_registry import StateRegistry
from tests.core.elastic.sharded import checkpoints
from tests.core.elastic.sharded.models import OPTIMIZERS, Training, WithItsOwn
from tests.docs.printed import printed_block


def check_four_shards_read_two_and_write_again(rank: int) -> None:
    for name in OPTIMIZERS:
        expected = torch.load(checkpoints.shared() / f"two-{name}.pt", weights_only=True)
        training = Training(name, seed=2)
        restored = checkpoints.read(checkpoints.shared() / f"two-{name}", training)
        assert restored.step == 4 and restored.position == checkpoints.POSITION
        whole = checkpoints.gathered(training)
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[n], expected[n]) for n in whole), name
        checkpoints.write(checkpoints.shared() / f"four-{name}", training, rank, 4, 1)
        training.train(1)
    dist.barrier()


def check_torch_loads_it_into_a_model_of_its_own(rank: int) -> None:
    text, printed_path = printed_block("docs/sharded-models.md", "dcp_reader(").text, '"checkpoints"'
    assert printed_path in text
    for name in ("adamw", "sgd"):
        expected = torch.load(checkpoints.shared() / f"two-{name}.pt", weights_only=True)
        for source in (f"two-{name}", f"four-{name}", f"plain-{name}"):
            training = Training(name, seed=5)
            code = text.replace(printed_path, repr(str(checkpoints.shared() / source)))
            exec(code, {"net": training.model, "optimizer": training.optimizer})
            whole = checkpoints.gathered(training)
            assert all(torch.equal(whole[n], expected[n]) for n in expected), (name, source)
            training.train(1)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


class Parallel(Training):
    """fully_shard over two workers on top of tensor parallelism over two."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        self.model = Wide()  # type: ignore[assignment]
        parallelize_module(self.model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["data"])
        self.optimizer = torch.optim.AdamW(
            [*self.model.up.parameters(), *self.model.down.parameters()], lr=0.01
        )
        self.registry = StateRegistry()
        self.registry.add_model(self.model, [self.optimizer])


def check_a_mesh_of_two_dimensions(rank: int) -> None:
    source, target = Parallel(1), Parallel(2)
    source.train(2)
    root = checkpoints.shared() / "parallel"
    checkpoints.write(root, source, rank, 4, 2)
    dist.barrier()
    checkpoints.read(root, target)
    expected, whole = checkpoints.gathered(source), checkpoints.gathered(target)
    assert all(torch.equal(whole[n], expected[n]) for n in expected if "norm" not in n)
    norms = dict(source.model.named_parameters()), dict(target.model.named_parameters())
    assert torch.equal(norms[0]["norm.weight"].to_local(), norms[1]["norm.weight"].to_local())
    if rank == 0:
        torch.save(expected, checkpoints.shared() / "parallel.pt")
    dist.barrier()


def check_what_is_of_two_shards_is_not_divided_among_four(rank: int) -> None:
    both = "was written with --replica-size 2 and this job has --replica-size 4"
    for algorithm, told in ((True, both), (False, "start with --replica-size 2")):
        try:
            checkpoints.read(
                checkpoints.shared() / f"own-{algorithm}", WithItsOwn(rank, 2, algorithm), rank, 4
            )
        except CheckpointMismatch as error:
            assert told in str(error) and "start with --replica-size 2" in str(error), str(error)
        else:
            raise AssertionError("it was read")


def check_torch_misses_what_is_of_two_shards(rank: int) -> None:
    training = WithItsOwn(rank, 2, False)
    training.train(1)
    weights, moments = get_state_dict(training.model, training.optimizer)
    reader = dcp_reader(str(checkpoints.shared() / "own-False"))
    try:
        dcp.load({"model": weights, "optimizer": moments}, storage_reader=reader)
    except dcp.api.CheckpointException as error:
        assert "Missing key in checkpoint state_dict: optimizer.state." in str(error), str(error)
    else:
        raise AssertionError("the momentum is not read, and that is not said")
    dcp.load({"model": weights}, storage_reader=reader)
