"""The original's own tests of training, on each of two workers; each case writes <directory>/<case>-<rank>.

A case compares with a reference that every worker computes by itself, for both ranks, in plain torch: their data follow
from rank and step.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core.torch_api as bagua
from bagua_core.torch_api.algorithms import async_model_average, decentralized, gradient_allreduce
from bagua_core.torch_api.data_parallel import DistributedDataParallel as DDP
from bagua_core.torch_api.utils import flatten, unflatten

bagua.init_process_group()
rank, size = bagua.get_rank(), bagua.get_world_size()
assert size == 2
STEPS = 10


class Net(nn.Module):
    def __init__(self, hidden=50):
        super().__init__()
        self.fc1 = nn.Linear(2, 10, bias=False)
        self.fc2 = nn.Linear(10, hidden)
        self.fc3 = nn.Linear(hidden, 4, bias=False)

    def forward(self, x):
        return F.softmax(self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))))), dim=1)


def built(of_rank, hidden=50):
    torch.manual_seed(of_rank)
    return Net(hidden)


def batch(of_rank, step, count=4):
    generator = torch.Generator().manual_seed(1000 * of_rank + step)
    return torch.randn(count, 2, generator=generator), torch.randn(count, 4, generator=generator)


def loss_of(model, of_rank, step):
    data, target = batch(of_rank, step)
    return F.mse_loss(model(data), target)


def learn(model, optimizer, of_rank, step):
    optimizer.zero_grad()
    loss_of(model, of_rank, step).backward()
    optimizer.step()


def flat(model):
    return flatten([p.detach() for p in model.parameters()])


def set_flat(model, weights):
    with torch.no_grad():
        for parameter, part in zip(
            model.parameters(), unflatten(weights, list(model.parameters())), strict=True
        ):
            parameter.copy_(part)


def mean_gradient_reference(hidden=50):
    """Rank 0's model, trained on both ranks' batches."""
    model = built(0, hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for r in range(size):
            (loss_of(model, r, step) / size).backward()
        optimizer.step()
    return flat(model)


def gradient_allreduce_is_the_mean_gradient():
    for hierarchical in (False, True):
        model = built(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm(hierarchical=hierarchical)
        model = model.with_bagua([optimizer], algorithm)
        torch.testing.assert_close(flat(model), flat(built(0)), rtol=0, atol=0)
        for step in range(STEPS):
            learn(model, optimizer, rank, step)
        torch.testing.assert_close(flat(model), mean_gradient_reference())


def two_models_take_turns():
    algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
    pairs = []
    for hidden in (50, 30):
        model = built(rank, hidden)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pairs.append((DDP(model, optimizers=[optimizer], algorithm=algorithm), optimizer))
    for step in range(STEPS):
        for model, optimizer in pairs:
            learn(model, optimizer, rank, step)
    for (model, _), hidden in zip(pairs, (50, 30), strict=True):
        torch.testing.assert_close(flat(model), mean_gradient_reference(hidden))


def decentralized_reference(interval):
    """With two ranks "all" and "shift_one" are the same mean. It is taken of the weights before the backward."""
    models = [built(0) for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(STEPS):
        for r, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, r, step).backward()
        if step % interval == 0:
            mean = (flat(models[0]) + flat(models[1])) / 2
            for model in models:
                set_flat(model, mean)
        for optimizer in optimizers:
            optimizer.step()
    return flat(models[rank])


def decentralized_averages_weights():
    for mode, interval in (("all", 1), ("shift_one", 1), ("shift_one", 2), ("all", 3)):
        model = built(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = decentralized.DecentralizedAlgorithm(
            hierarchical=False, peer_selection_mode=mode, communication_interval=interval
        )
        # an interval counts the job's steps, of which each model here takes STEPS: 0, 10, 20 and 30 are due
        model = DDP(model, optimizers=[optimizer], algorithm=algorithm)
        for step in range(STEPS):
            learn(model, optimizer, rank, step)
        torch.testing.assert_close(flat(model.module), decentralized_reference(interval))


def optimizers_begin_with_rank_0s_state():
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.Rprop,
        torch.optim.AdamW,
        torch.optim.Adadelta,
    ):
        options = {"lr": 0.1 + rank / 10} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
        model = built(rank)
        optimizer = kind(model.parameters(), **options)
        for step in range(5):  # by itself
            learn(model, optimizer, rank, step)
        DDP(model, optimizers=[optimizer], algorithm=decentralized.DecentralizedAlgorithm())
        own = optimizer.state_dict()
        told = bagua.broadcast_object({"weights": flat(model), "state": own}, 0)
        assert torch.equal(told["weights"], flat(model))
        assert told["state"]["param_groups"] == own["param_groups"] and own["param_groups"][0]["lr"] == 0.1
        for key, values in told["state"]["state"].items():
            for name, value in values.items():
                mine = own["state"][key][name]
                assert torch.equal(value, mine) if isinstance(value, torch.Tensor) else value == mine, name


def an_optimizer_is_fused_after_the_model_was_wrapped():
    for do_flatten in (False, True):
        model = built(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
        model.with_bagua([optimizer], algorithm, do_flatten=do_flatten)
        optimizer = bagua.contrib.fuse_optimizer(optimizer, do_flatten=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.fuse_step()
        torch.testing.assert_close(flat(model), mean_gradient_reference())


def asynchronous_averaging_is_aborted_and_resumed():
    for warmup_steps in (0, 5):
        model = built(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm = async_model_average.AsyncModelAverageAlgorithm(
            sync_interval_ms=1, warmup_steps=warmup_steps
        )
        ddp = DDP(model, optimizers=[optimizer], algorithm=algorithm)
        for epoch in range(4):
            ddp.bagua_algorithm.resume(ddp)
            ddp.bagua_algorithm.resume(ddp)
            for step in range(STEPS):
                learn(ddp, optimizer, rank, STEPS * epoch + step)
            ddp.bagua_algorithm.abort(ddp)
            ddp.bagua_algorithm.abort(ddp)


def a_copy_trains_by_itself():
    model = built(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
    learn(model, optimizer, rank, 0)
    alone = copy.deepcopy(model)
    assert alone.bagua_algorithm is None


for case in sys.argv[2:]:
    globals()[case]()
    (Path(sys.argv[1]) / f"{case}-{rank}").touch()
