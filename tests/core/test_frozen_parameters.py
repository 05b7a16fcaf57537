"""Parameters that are frozen and unfrozen during training: as in one process, on all workers alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from bagua_contract.step_settings import StepSettings, declared_algorithm
from bagua_core.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    CompressedAllreduce,
    LocalSGD,
    QAdam,
    QAdamOptimizer,
)
from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.reduction.trained_parameters import (
    CannotTakeOn,
    FrozenWithinStep,
    TrainedParametersDiffer,
    difference,
)
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.optimizers.script_checks import SharedParametersError
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import FakeEngine, gloo_world, in_process_world, run_ranks, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(2))
HEAD, ENCODER, ALL = ("head",), ("encoder",), ("encoder", "middle", "head")
SHARES = [(0, 5), (5, 12)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.encoder(x)))))
        return y


def train_only(net: nn.Module, parts: tuple[str, ...]) -> None:
    for name, part in net.named_children():
        part.requires_grad_(name in parts)


def weights_of(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()])


adam_w = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


class Worker:
    def __init__(
        self,
        communicator: Communicator | None,
        wrapped_with: tuple[str, ...] = ALL,
        algorithm: str | Algorithm = "gradient_allreduce",
        share: tuple[int, int] | None = None,
        find_unused: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] = adam_w,
    ) -> None:
        self.engine = FakeEngine(communicator)
        self.rank = communicator.global_rank if communicator else 0
        self.share = SHARES[self.rank] if share is None else share
        self.net = seeded(Net)
        train_only(self.net, wrapped_with)
        self.optimizer = optimizer(self.net.parameters())
        self.model = DistributedDataParallel(
            self.net,
            [self.optimizer],
            algorithm,
            bucket_cap_mb=0.0002,
            find_unused_parameters=find_unused,
            engine=self.engine,
        )

    def step(self, parts: int = 1) -> None:
        self.optimizer.zero_grad()
        self.backward(parts)
        self.optimizer.step()
        if self.engine.step_failed:
            self.model.step_rolled_back()
            return
        self.model.step_committed()
        self.engine.step += 1

    def backward(self, parts: int = 1) -> None:
        begin, end = self.share
        for number in range(parts):
            first = begin + number * (end - begin) // parts
            last = begin + (number + 1) * (end - begin) // parts
            self.engine.begin_micro_batch(MicroBatch((last - first) / 12, number == parts - 1))
            nn.functional.mse_loss(self.model(X[first:last]), Y[first:last]).backward()

    @property
    def sent_bytes(self) -> int:
        return sum(b.flat.nbytes for b, _ in self.model._exchange.buckets_of_parameters())  # type: ignore[attr-defined]


def one_process(wrapped_with: tuple[str, ...], schedule: list[tuple[str, ...]]) -> torch.Tensor:
    net = seeded(Net)
    train_only(net, wrapped_with)
    optimizer = adam_w(net.parameters())
    for trained in schedule:
        optimizer.zero_grad()
        train_only(net, trained)
        nn.functional.mse_loss(net(X), Y).backward()
        optimizer.step()
    return weights_of(net)


SCHEDULES = [
    (HEAD, [HEAD, HEAD, ALL, ALL, ALL]),
    (ALL, [ALL, HEAD, HEAD, HEAD, ALL]),
    (HEAD, [HEAD, ENCODER, ENCODER, ENCODER, ENCODER, ALL, HEAD, ALL]),
    (ALL, [ENCODER, HEAD, ENCODER, HEAD, ENCODER, HEAD]),
    (("head", "middle"), [ALL, HEAD, ("middle",), ALL, ("encoder", "head"), ("encoder", "head"), ALL]),
]


@pytest.mark.parametrize(("wrapped_with", "schedule"), SCHEDULES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("find_unused", [False, True])
def test_any_schedule_is_one_processs(
    wrapped_with: tuple[str, ...], schedule: list[tuple[str, ...]], parts: int, find_unused: bool
) -> None:
    members = [Worker(c, wrapped_with, find_unused=find_unused) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for trained in schedule:
            train_only(w.net, trained)
            w.step(parts)
            for name, p in w.net.named_parameters():
                assert (p.grad is not None) == (name.split(".")[0] in trained), name

    run_ranks(members, act)
    assert torch.equal(weights_of(members[0].net), weights_of(members[1].net))
    torch.testing.assert_close(weights_of(members[0].net), one_process(wrapped_with, schedule))
    assert all(len(w.engine.pairs) == len(schedule) for w in members)


@pytest.mark.parametrize("algorithm", [ByteGrad(), CompressedAllreduce("minmax_uint8", feedback=False)])
@pytest.mark.parametrize(("wrapped_with", "schedule"), SCHEDULES)
def test_with_messages_that_are_compressed_without_errors_kept_too(
    wrapped_with: tuple[str, ...], schedule: list[tuple[str, ...]], algorithm: Algorithm
) -> None:
    """Of buckets so small that none is compressed."""
    members = [Worker(c, wrapped_with, algorithm) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for trained in schedule:
            train_only(w.net, trained)
            w.step()

    run_ranks(members, act)
    assert torch.equal(weights_of(members[0].net), weights_of(members[1].net))
    torch.testing.assert_close(weights_of(members[0].net), one_process(wrapped_with, schedule))


@pytest.mark.parametrize("unfreezes_first", [True, False])
def test_a_job_that_unfreezes_may_be_switched_to_compressed_messages(unfreezes_first: bool) -> None:
    members = [Worker(c, HEAD) for c in in_process_world(2)]
    schedule = [HEAD, ALL, ALL, ALL, ALL] if unfreezes_first else [HEAD, HEAD, HEAD, ALL, ALL]

    def act(w: Worker) -> None:
        for number, trained in enumerate(schedule):
            if number == 3:
                assert w.model.use_settings(StepSettings(algorithm="bytegrad")) == ""
                w.model.communicator_changed()
            train_only(w.net, trained)
            w.step()

    run_ranks(members, act)
    assert torch.equal(weights_of(members[0].net), weights_of(members[1].net))
    torch.testing.assert_close(weights_of(members[0].net), one_process(HEAD, schedule))


@pytest.mark.parametrize("declared", ["gradient_allreduce", "bytegrad"])
def test_a_job_that_may_unfreeze_is_not_switched_to_qadam(declared: str) -> None:
    optimizer = partial(QAdamOptimizer, lr=0.05, warmup_steps=1)
    members = [Worker(c, HEAD, declared, optimizer=optimizer) for c in in_process_world(2)]

    def act(w: Worker) -> str:
        w.step()
        why = w.model.use_settings(StepSettings(algorithm="qadam"))
        w.model.communicator_changed()
        train_only(w.net, ALL)
        for _ in range(3):
            w.step()
        return why

    for why in run_ranks(members, act):
        assert "frozen when the model was wrapped" in why
    assert torch.equal(weights_of(members[0].net), weights_of(members[1].net))
    for wrapped_with, algorithm in ((ALL, declared), (HEAD, QAdam())):
        other = Worker(None, wrapped_with, algorithm, share=(0, 12), optimizer=optimizer)
        assert other.model.use_settings(StepSettings(algorithm="qadam")) == ""


def test_over_gloo_too() -> None:
    wrapped_with, schedule = SCHEDULES[2]
    members = [Worker(c, wrapped_with) for c in gloo_world(2)]

    def act(w: Worker) -> None:
        for trained in schedule:
            train_only(w.net, trained)
            w.step()

    run_ranks(members, act)
    assert torch.equal(weights_of(members[0].net), weights_of(members[1].net))
    torch.testing.assert_close(weights_of(members[0].net), one_process(wrapped_with, schedule))


def test_a_world_of_one_too() -> None:
    wrapped_with, schedule = SCHEDULES[2]
    worker = Worker(None, wrapped_with, share=(0, 12))
    for trained in schedule:
        train_only(worker.net, trained)
        worker.step()
    torch.testing.assert_close(weights_of(worker.net), one_process(wrapped_with, schedule))


def test_what_is_frozen_for_good_is_not_sent_any_more() -> None:
    members = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> tuple[int, int]:
        w.step()
        whole = w.sent_bytes
        train_only(w.net, HEAD)
        for _ in range(3):
            w.step()
        return whole, w.sent_bytes

    head = sum(p.nbytes for p in members[0].net.head.parameters())
    for whole, small in run_ranks(members, act):
        assert whole > 3 * head and head < small < 2 * head


def test_parts_of_a_model_may_take_turns_within_a_step() -> None:
    members = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for _ in range(4):
            for trained in (ENCODER, HEAD):
                train_only(w.net, trained)
                w.optimizer.zero_grad()
                w.backward()
                w.optimizer.step()
            w.model.step_committed()
            w.engine.step += 1

    run_ranks(members, act)
    assert torch.equal(weights_of(members[0].net), weights_of(members[1].net))
    torch.testing.assert_close(weights_of(members[0].net), one_process(ALL, [ENCODER, HEAD] * 4))


def test_a_model_that_is_frozen_as_a_whole_is_only_passed_through() -> None:
    members = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for _ in range(3):
            w.net.requires_grad_(False)
            x = X[:2].clone().requires_grad_()
            w.model(x).sum().backward()
            assert x.grad is not None
            w.net.requires_grad_(True)
            w.step()

    run_ranks(members, act)
    torch.testing.assert_close(weights_of(members[0].net), one_process(ALL, [ALL] * 3))


# -- what is refused


@pytest.mark.parametrize(
    ("wrapped_with", "odd", "text"),
    [
        (ALL, HEAD, r"rank 0 trains encoder.weight, .* and rank 1 has them frozen"),
        (
            HEAD,
            ENCODER,
            r"rank 0 trains head.weight, head.bias and rank 1 has .*; rank 1 trains encoder.weight",
        ),
    ],
)
def test_ranks_that_do_not_agree_are_named(
    wrapped_with: tuple[str, ...], odd: tuple[str, ...], text: str
) -> None:
    members = [Worker(c, wrapped_with) for c in in_process_world(2)]

    def act(w: Worker) -> str:
        w.step()
        if w.rank == 1:
            train_only(w.net, odd)
        with pytest.raises(TrainedParametersDiffer, match=text) as raised:
            w.step()
        return str(raised.value)

    first, second = run_ranks(members, act)
    assert first == second


def test_micro_batches_of_a_step_train_the_same_parameters() -> None:
    worker = Worker(None, share=(0, 12))
    worker.engine.begin_micro_batch(MicroBatch(0.5, False))
    worker.model(X[:6]).sum().backward()
    worker.net.encoder.requires_grad_(False)
    worker.engine.begin_micro_batch(MicroBatch(0.5, True))
    with pytest.raises(FrozenWithinStep, match=r"encoder.weight, encoder.bias: frozen or unfrozen between"):
        worker.model(X[6:])


@pytest.mark.parametrize(
    "algorithm",
    ["local_sgd", "streaming_diloco", CompressedAllreduce("minmax_uint8")],
    ids=["local_sgd", "streaming_diloco", "compressed with feedback"],
)
def test_algorithms_that_know_their_parameters_from_the_start_say_so(algorithm: str | Algorithm) -> None:
    members = [Worker(c, HEAD, algorithm) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        w.step()
        w.net.head.bias.requires_grad_(False)
        w.step()
        assert w.net.head.bias.grad is None
        w.net.head.bias.requires_grad_(True)
        w.step()
        assert w.net.head.bias.grad is not None
        train_only(w.net, ALL)
        with pytest.raises(CannotTakeOn, match=r"encoder.weight, .*Wrap the model first"):
            w.step()

    run_ranks(members, act)


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize(
    "algorithm", [LocalSGD(unit="round"), AsyncModelAverage(unit="round")], ids=["local_sgd", "async"]
)
def test_in_rounds_none_can_be_taken_on(algorithm: Algorithm, has_optimizer: bool) -> None:
    net = seeded(Net)
    train_only(net, HEAD)
    optimizers = [adam_w(net.parameters())] if has_optimizer else None
    model = DistributedDataParallel(net, optimizers, algorithm, engine=FakeEngine())
    model(X)
    train_only(net, ALL)
    with pytest.raises(CannotTakeOn, match=r"encoder.weight, .*Wrap the model first"):
        model(X)
    train_only(net, HEAD)
    model(X)


def test_parameters_of_another_model_cannot_be_unfrozen() -> None:
    engine, first, second = FakeEngine(), seeded(Net), seeded(Net)
    second.encoder = first.encoder
    models = []
    for net in (first, second):
        train_only(net, HEAD)
        models.append(DistributedDataParallel(net, None, engine=engine))
    train_only(first, ALL)
    models[0](X).sum().backward()
    with pytest.raises(SharedParametersError, match=r"encoder.weight, encoder.bias: another wrapped model"):
        models[1](X)


def test_models_that_are_wrapped_with_other_parameters_frozen_have_other_fingerprints() -> None:
    names = [Worker(None, parts, share=(0, 12)).model.algorithm_name for parts in (ALL, HEAD, ENCODER)]
    assert names[0] == "gradient_allreduce"
    assert names[1].startswith("gradient_allreduce, 4 of 6 parameters frozen (")
    assert len(set(names)) == 3
    assert {declared_algorithm({"algorithm": name}) for name in names} == {"gradient_allreduce"}


# -- generations


def test_a_worker_that_joins_has_the_layout_of_its_wrapping() -> None:
    members = [Worker(c, HEAD, share=(0, 6)) for c in in_process_world(2)]

    def unfrozen(w: Worker) -> None:
        train_only(w.net, ALL)
        for _ in range(4):
            w.step()

    run_ranks(members, unfrozen)
    newcomer = Worker(None, HEAD)
    train_only(newcomer.net, ALL)
    newcomer.net.load_state_dict(members[0].net.state_dict())
    newcomer.optimizer.load_state_dict(copy.deepcopy(members[0].optimizer.state_dict()))
    newcomer.engine.step = members[0].engine.step
    all_workers = [*members, newcomer]
    for w, communicator, share in zip(
        all_workers, in_process_world(3), [(0, 4), (4, 5), (5, 12)], strict=True
    ):
        w.engine.enter(communicator)
        w.model.communicator_changed()
        w.share = share
    expected = Worker(None, HEAD, share=(0, 12))
    expected.net.load_state_dict(members[0].net.state_dict())
    expected.optimizer.load_state_dict(copy.deepcopy(members[0].optimizer.state_dict()))
    train_only(expected.net, ALL)
    for _ in range(3):
        expected.step()
    run_ranks(all_workers, lambda w: [w.step() for _ in range(3)])
    for w in all_workers:
        assert torch.equal(weights_of(w.net), weights_of(all_workers[0].net))
    torch.testing.assert_close(weights_of(all_workers[0].net), weights_of(expected.net))


def test_a_peer_lost_while_parameters_are_unfrozen_fails_the_step_only() -> None:
    world = build_in_process(2)
    members = [Worker(c, HEAD) for c in world]
    run_ranks(members, Worker.step)
    survivor = members[0]
    before = weights_of(survivor.net)
    world[1].lose("10.0.0.9")
    train_only(survivor.net, ALL)
    survivor.step()
    assert survivor.engine.failed is not None
    assert torch.equal(weights_of(survivor.net), before)
    expected = copy.deepcopy(survivor.net)
    survivor.engine.enter(None)
    survivor.model.communicator_changed()
    survivor.share = (0, 12)
    survivor.optimizer.zero_grad()
    survivor.backward()
    expected.zero_grad()
    nn.functional.mse_loss(expected(X), Y).backward()
    for mine, other in zip(survivor.net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_loss_after_the_vote_fails_the_step_too() -> None:
    """Parameters that were unfrozen are reduced last, behind the numbers that ranks agree by."""
    world = build_in_process(2)
    members = [Worker(c, HEAD) for c in world]
    run_ranks(members, Worker.step)
    before = weights_of(members[0].net)
    gather = world[1].allgather

    def last_message(output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        pending = gather(output, tensor)
        pending.wait()
        world[1].lose("10.0.0.9")
        return pending

    world[1].allgather = last_message  # type: ignore[method-assign]

    def act(w: Worker) -> None:
        train_only(w.net, ALL)
        w.step()
        assert w.engine.failed is not None

    run_ranks(members, act)
    for w, communicator in zip(members, in_process_world(2), strict=True):
        assert torch.equal(weights_of(w.net), before)
        assert len(w.engine.pairs) == 1
        w.engine.enter(communicator)
        w.model.communicator_changed()
    run_ranks(members, lambda w: [w.step() for _ in range(2)])
    assert torch.equal(weights_of(members[0].net), weights_of(members[1].net))
    torch.testing.assert_close(weights_of(members[0].net), one_process(HEAD, [HEAD, ALL, ALL]))


def test_equal_choices_are_no_difference() -> None:
    assert difference([b"\1\0", b"\1\0"], ["a", "b"]) is None
    text = difference([b"\1\0", b"\1\0", b"\1\1"], ["a", "b"])
    assert text is not None and text.startswith("rank 2 trains b and rank 0 has them frozen.")
