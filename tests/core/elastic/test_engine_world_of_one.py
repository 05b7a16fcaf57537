"""Without an agent a script trains as plain torch would, bit for bit; the step's rules hold all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bagua_core.communication.communicator import CollectiveFailed, ReduceOp
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.data.partition import epoch_order
from bagua_core.elastic.step.engine import Engine
from bagua_core.elastic.step.script_inputs import SecondLoaderError
from bagua_core.elastic.step.step_seed import seed_generators
from bagua_core.parallel import DistributedDataParallel

SEED = 11
BATCH = 8
EPOCHS = 3
DATA = TensorDataset(
    torch.randn(44, 5, generator=torch.Generator().manual_seed(1)),
    torch.randn(44, 1, generator=torch.Generator().manual_seed(2)),
)
STEPS_PER_EPOCH = 6  # the last batch has 4 samples


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class Script:
    """Model, optimizer and scheduler of a script, as yet without bagua."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.losses: list[float] = []

    def step(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(float(loss.detach()))

    def state(self) -> list[Any]:
        return [
            {name: tensor.tolist() for name, tensor in self.net.state_dict().items()},
            {
                number: {name: value.tolist() for name, value in of_one.items()}
                for number, of_one in self.optimizer.state_dict()["state"].items()
            },
            self.optimizer.param_groups[0]["lr"],
            self.scheduler.state_dict()["last_epoch"],
            self.losses,
        ]


class Job:
    """The same script with bagua, in a world of one."""

    def __init__(self) -> None:
        self.script = Script()
        self.engine = Engine(None)
        self.model = DistributedDataParallel(self.script.net, [self.script.optimizer], engine=self.engine)
        self.engine.register_state("scheduler", self.script.scheduler)
        self.loader = ElasticDataLoader(DATA, BATCH, seed=SEED, engine=self.engine)

    def train(self) -> list[int]:
        epochs = []
        for epoch in self.loader.epochs(EPOCHS):
            epochs.append(epoch)
            for x, y in self.loader:
                self.script.step(self.model, x, y)
        return epochs


def plain(steps: int = EPOCHS * STEPS_PER_EPOCH) -> Script:
    """The common training loop. Only the order and the step's random numbers are taken from bagua."""
    script = Script()
    done = 0
    for epoch in range(EPOCHS):
        for indices in epoch_order(SEED, epoch, len(DATA), True).split(BATCH):
            if done == steps:
                return script
            seed_generators(SEED, done, 0)
            script.step(script.net, DATA.tensors[0][indices], DATA.tensors[1][indices])
            done += 1
    return script


def test_a_loop_trains_as_plain_torch_does_bit_for_bit() -> None:
    job = Job()
    assert job.train() == [0, 1, 2]
    assert len(job.script.losses) == EPOCHS * STEPS_PER_EPOCH
    assert job.script.state() == plain().state()


def test_what_the_script_is_told_of_its_world() -> None:
    job = Job()
    for _ in range(2):
        engine = job.engine
        assert not engine.launched
        assert (engine.global_rank, engine.world_size, engine.local_rank, engine.generation_number) == (
            0,
            1,
            0,
            0,
        )
        assert engine.communicator() is None
        job.train()
    assert job.engine.finish()
    assert not job.engine.shutdown(0), "a process of its own may end as it likes"


def test_a_break_and_an_exception_lose_no_sample_and_repeat_none() -> None:
    job = Job()
    for epoch in job.loader.epochs(EPOCHS):
        for number, (x, y) in enumerate(job.loader):
            job.script.step(job.model, x, y)
            if epoch == 1 and number == 1:
                break
    assert job.script.state() == plain().state()


# -- a step that failed


@pytest.mark.parametrize(
    ("failing", "when"),
    [
        ({0, 5, 6}, "before the forward pass"),
        ({7, 17}, "before the forward pass"),
        ({0, 5, 6}, "before the optimizer"),
        ({7, 17}, "before the optimizer"),
    ],
)
def test_a_failed_step_is_done_again_and_leaves_no_trace(failing: set[int], when: str) -> None:
    job, failed = Job(), set(failing)
    for _ in job.loader.epochs(EPOCHS):
        for x, y in job.loader:
            if (step := job.engine.plan.step) not in failed:
                job.script.step(job.model, x, y)
                continue
            failed.remove(step)
            if when == "before the forward pass":
                job.engine.reduction_failed(CollectiveFailed("a test"))
            job.script.optimizer.zero_grad()
            nn.functional.mse_loss(job.model(x), y).backward()
            if when == "before the optimizer":
                job.engine.reduction_failed(CollectiveFailed("a test"))
            job.script.optimizer.step()
            job.script.scheduler.step()
    assert not failed
    assert job.script.state() == plain().state()


def test_a_failed_step_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job()
    for number, (x, y) in enumerate(job.loader):
        job.script.step(job.model, x, y)
        if number == 2:
            job.engine.reduction_failed(CollectiveFailed("the cable"))
        if number == 3:
            break
    job.engine.boundary()
    assert "bagua: step 2 in generation 0 did not happen: the cable" in capfd.readouterr().err


# -- without the loader


def test_next_step_counts_commits() -> None:
    engine = Engine(None)
    assert [engine.next_step() for _ in range(4)] == [0, 1, 2, 3]
    engine.reduction_failed(CollectiveFailed("a test"))
    assert [engine.next_step() for _ in range(3)] == [3, 4, 5]


def test_a_loop_without_the_loader_trains_as_plain_torch_does() -> None:
    script, engine = Script(), Engine(None)
    model = DistributedDataParallel(script.net, [script.optimizer], engine=engine)
    engine.register_state("scheduler", script.scheduler)
    other = Script()
    while (step := engine.next_step()) < 5:
        x, y = DATA.tensors[0][step::5], DATA.tensors[1][step::5]
        script.step(model, x, y)
    for step in range(5):
        seed_generators(3, step, 0)  # what the script gave to torch.manual_seed
        other.step(other.net, DATA.tensors[0][step::5], DATA.tensors[1][step::5])
    assert script.state() == other.state()


class Noisy(nn.Module):
    """Draws in its forward, as dropout or the latent noise of an autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.drawn: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(x), 1)
        self.drawn.append(noise.flatten().tolist())
        result: torch.Tensor = self.layer(x) + noise
        return result


def test_a_loop_without_the_loader_draws_other_numbers_before_the_forward_than_in_it() -> None:
    net, engine = Noisy(), Engine(None)
    engine.seed(SEED)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, [optimizer], engine=engine)
    before: list[list[float]] = []
    while engine.next_step() < 3:
        before.append(torch.randn(4, 1).flatten().tolist())
        model(DATA.tensors[0][:4]).sum().backward()
        optimizer.step()
        if len(before) == 2:
            engine.reduction_failed(CollectiveFailed("a test"))
    drawn = before + net.drawn
    assert len(before) == len(net.drawn) == 4
    assert before[1] == before[2] and net.drawn[1] == net.drawn[2], "a step that is done again draws the same"
    assert len({tuple(numbers) for numbers in drawn}) == 6


# -- outside steps


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("in_step", [False, True])
def test_a_collective_of_one_gives_a_copy(op: ReduceOp, in_step: bool) -> None:
    engine = Engine(None)
    if in_step:
        engine.next_step()
    tensor = torch.tensor([1, 2])  # what every operation can reduce
    result = engine.allreduce(tensor, op)
    assert torch.equal(result, tensor) and result is not tensor
    assert result.data_ptr() != tensor.data_ptr()


# -- what a script can get wrong


def test_a_second_loader_is_an_error_once_steps_are_counted() -> None:
    job = Job()
    evaluation = ElasticDataLoader(DATA, BATCH, seed=5, engine=job.engine)
    for x, y in job.loader:
        job.script.step(job.model, x, y)
        break
    with pytest.raises(SecondLoaderError, match="plain torch DataLoader for evaluation"):
        next(iter(evaluation))


def test_a_second_loader_is_an_error_in_the_first_ones_epochs_too() -> None:
    """The first one would serve its first batch for ever, since the job's position would be the second one's."""
    job = Job()
    evaluation = ElasticDataLoader(DATA, BATCH, seed=5, engine=job.engine)
    for _ in job.loader.epochs(1):
        with pytest.raises(SecondLoaderError, match="plain torch DataLoader for evaluation"):
            next(iter(evaluation))
        for x, y in job.loader:
            job.script.step(job.model, x, y)
    assert job.script.state() == plain(STEPS_PER_EPOCH).state()


def test_a_loader_that_is_only_made_does_no_harm() -> None:
    job = Job()
    ElasticDataLoader(DATA, BATCH, seed=5, engine=job.engine)
    job.train()
    assert job.script.state() == plain().state()


def test_what_cannot_be_registered_is_refused() -> None:
    engine = Engine(None)
    scheduler = Script().scheduler
    engine.register_state("scheduler", scheduler)
    engine.register_state("scheduler", scheduler)
    with pytest.raises(ValueError, match="the name is taken"):
        engine.register_state("scheduler", Script().scheduler)
    with pytest.raises(TypeError, match="int has no state_dict"):
        engine.register_state("count", 3)  # type: ignore[arg-type]


def test_the_fingerprint_names_all_that_must_agree() -> None:
    job = Job()
    assert job.engine.fingerprint()["loader"] == "none"
    next(iter(job.loader))
    fingerprint = job.engine.fingerprint()
    assert {"model", "optimizers", "registered", "seed", "dataset_length", "algorithm", "torch"} <= set(
        fingerprint
    )
    assert fingerprint["seed"] == str(SEED)
    assert fingerprint["registered"] == "scheduler"
    assert fingerprint["algorithm"] == "gradient_allreduce"


class GrowingNet(Net):
    """Its buffers appear and grow in forwards, as a cache of positions and the observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, torch.ones(1)])
        self.late = torch.ones(2)
        result: torch.Tensor = super().forward(x)
        return result


def test_the_fingerprint_stays_the_same_when_a_forward_changes_buffers() -> None:
    torch.manual_seed(3)
    net, engine = GrowingNet(), Engine(None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, [optimizer], engine=engine)
    loader = ElasticDataLoader(DATA, BATCH, seed=SEED, engine=engine)
    described = []
    for x, y in loader:
        described.append(engine.fingerprint())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert net.cache.shape != (1,) and all(each == described[0] for each in described)


def dropped(engine: Engine) -> list[list[float]]:
    """What dropout leaves in three steps."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), None, engine=engine)
    found = []
    while engine.next_step() < 3:
        found.append((model(torch.ones(1, 6)) != 0).flatten().float().tolist())
    return found


def test_random_numbers_of_steps_follow_from_the_script_s_seed() -> None:
    def drawn(script_seed: int, given: int | None) -> list[list[float]]:
        torch.manual_seed(script_seed)
        engine = Engine(None)
        if given is not None:
            engine.seed(given)
        return dropped(engine)

    assert drawn(1, None) == drawn(1, None)
    assert drawn(1, None) != drawn(2, None)
    assert drawn(1, 5) == drawn(2, 5) != drawn(1, 6)


def test_the_job_s_position_is_on_the_loader() -> None:
    engine = Engine(None)
    loader = ElasticDataLoader(DATA, BATCH, seed=SEED, engine=engine)
    positions = [
        (epoch, index, loader.step) for epoch in loader.epochs(2) for index, _ in loader.enumerate(start=1)
    ]
    assert positions == [(s // 6, s % 6 + 1, s) for s in range(2 * STEPS_PER_EPOCH)]


def test_a_step_done_again_keeps_its_index_and_enumerate_is_warned_of(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def indices(enumerated: bool) -> list[int]:
        script, engine = Script(), Engine(None)
        model = DistributedDataParallel(script.net, [script.optimizer], engine=engine)
        loader = ElasticDataLoader(DATA, BATCH, seed=SEED, engine=engine)
        found = []
        for index, (x, y) in enumerate(loader) if enumerated else loader.enumerate():
            found.append(index)
            if len(found) == 3:
                engine.reduction_failed(CollectiveFailed("a peer is gone"))
            script.step(model, x, y)
            if len(found) == STEPS_PER_EPOCH:
                break
        return found

    assert indices(enumerated=False) == [0, 1, 2, 2, 3, 4]
    assert "loader.enumerate()" not in capfd.readouterr().err
    assert indices(enumerated=True) == [0, 1, 2, 3, 4, 5]
    said = capfd.readouterr().err
    assert said.count("enumerate(loader) gives index 3 to what is step 2 of the job's epoch") == 1


def test_an_optimizer_step_before_the_loop_takes_none_of_the_loop_s() -> None:
    job = Job()
    job.script.optimizer.step()  # quiets a scheduler's warning
    job.train()
    assert job.script.state() == plain().state()


def test_updates_outside_steps_take_none_of_the_loop_s() -> None:
    """A warm-up with another loader, without a launcher."""

    def trained(wrapped: bool) -> list[Any]:
        script = Script()
        model: nn.Module = script.net
        engine = Engine(None)
        if wrapped:
            model = DistributedDataParallel(script.net, [script.optimizer], engine=engine)
        torch.manual_seed(5)
        script.step(model, *DATA[:8])
        script.step(model, *DATA[8:16])
        torch.manual_seed(6)
        for step in range(3):
            if wrapped:
                assert engine.next_step() == step
            else:
                seed_generators(6, step, 0)  # what the script gave to torch.manual_seed
            script.step(model, *DATA[16:24])
        if wrapped:
            engine.finish()
        return script.state()

    assert trained(wrapped=True) == trained(wrapped=False)


def test_under_plain_python_a_script_needs_no_steps() -> None:
    """Neither the loader nor next_step(): a model that is wrapped trains as it would without."""

    def trained(wrapped: bool) -> list[Any]:
        script = Script()
        model = (
            DistributedDataParallel(script.net, [script.optimizer], engine=Engine(None))
            if wrapped
            else script.net
        )
        torch.manual_seed(5)
        for step in range(3):
            script.step(model, DATA.tensors[0][step::3], DATA.tensors[1][step::3])
        return script.state()

    assert trained(wrapped=True) == trained(wrapped=False)


def test_a_script_may_begin_at_another_place_in_the_data() -> None:
    engine = Engine(None)
    loader = ElasticDataLoader(DATA, BATCH, seed=SEED, engine=engine)
    loader.seek({"epoch": 1, "batch": 2})
    next(iter(loader))
    assert (loader.position(), loader.step) == ({"epoch": 1, "batch": 2}, 0)
