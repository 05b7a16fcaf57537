"""A model follows the settings of each generation: other buckets, another route, another algorithm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch
from torch import nn

from bagua_contract.step_settings import AS_SCRIPTED, SWITCHABLE, StepSettings
from bagua_core.algorithms import (
    Algorithm,
    ByteGrad,
    GradientAllreduce,
    LocalSGD,
    QAdam,
    QAdamOptimizer,
    find_algorithm,
)
from bagua_core.algorithms.momentum_sum import MomentumSum
from bagua_core.algorithms.tuned import tuned
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.reduction.trained_parameters import CannotTakeOn
from tests.core.algorithms.gradient_ranks import Rank, assert_equal_bits, exact, net, world_on_nodes
from tests.core.communication.worlds import in_process_world, run_ranks

WHOLE = StepSettings(bucket_bytes=1 << 24)
SMALL = StepSettings(bucket_bytes=1 << 10)
COMPRESSED = StepSettings(algorithm="bytegrad", hierarchical=False)


def buckets(rank: Rank) -> list[list[int]]:
    """Sizes of the tensors in each bucket, in the order in which buckets leave."""
    exchange = rank.model._exchange
    assert isinstance(exchange, Reducer)
    return [[p.numel() for p in parameters] for _, parameters in exchange.buckets_of_parameters()]


def use(rank: Rank, settings: StepSettings) -> None:
    assert rank.model.use_settings(settings) == ""
    rank.model.communicator_changed()


@pytest.mark.parametrize("name", SWITCHABLE)
def test_every_switchable_algorithm_is_one(name: str) -> None:
    assert type(tuned(GradientAllreduce(), StepSettings(algorithm=name))) is type(find_algorithm(name))


@pytest.mark.parametrize(
    ("declared", "settings", "expected"),
    [
        (GradientAllreduce(), AS_SCRIPTED, "gradient_allreduce"),
        (GradientAllreduce(True), StepSettings(hierarchical=False), "gradient_allreduce"),
        (ByteGrad(False), AS_SCRIPTED, "bytegrad(hierarchical=False, average=True)"),
        (GradientAllreduce(average=False), COMPRESSED, "bytegrad(hierarchical=False, average=False)"),
        # what the script says of one algorithm says nothing of another
        (
            GradientAllreduce(),
            StepSettings(algorithm="bytegrad"),
            "bytegrad(hierarchical=True, average=True)",
        ),
        (ByteGrad(), StepSettings(algorithm="gradient_allreduce"), "gradient_allreduce"),
    ],
)
def test_the_algorithm_that_settings_make(declared: Algorithm, settings: StepSettings, expected: str) -> None:
    found = tuned(declared, settings)
    assert found is not None and found.described == expected


class OwnAllreduce(GradientAllreduce):
    """A script's."""


@pytest.mark.parametrize("declared", [LocalSGD(), OwnAllreduce()], ids=["with a state", "of a script"])
def test_others_are_left_alone(declared: Algorithm) -> None:
    assert tuned(declared, COMPRESSED) is None


def test_a_model_without_settings_says_so_and_trains_on() -> None:
    rank = Rank(None, LocalSGD())
    assert rank.model.use_settings(AS_SCRIPTED) == ""
    assert rank.model.use_settings(SMALL) == "algorithm local_sgd takes no settings"
    assert rank.step()


def test_gradients_are_the_mean_in_whatever_buckets() -> None:
    members = [Rank(c, GradientAllreduce()) for c in in_process_world(2)]
    before = buckets(members[0])
    order = (4, 3, 2, 1, 0, 5)
    for settings, count in ((WHOLE, 1), (SMALL, 4), (StepSettings(order=order), 5), (AS_SCRIPTED, 4)):
        for member in members:
            use(member, settings)
        assert len(buckets(members[0])) == count, settings
        if settings.order:
            numels = [p.numel() for p in members[0].inner.parameters()]
            assert [n for each in buckets(members[0]) for n in each] == [numels[i] for i in order]
        mean, _ = exact(Rank(None, GradientAllreduce()), 2)
        run_ranks(members, lambda r: r.backward())
        assert_equal_bits([m.gradients() for m in members])
        for got, want in zip(members[0].gradients(), mean, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert buckets(members[0]) == before


def test_an_order_of_another_model_is_ignored() -> None:
    rank = Rank(None, GradientAllreduce())
    before = buckets(rank)
    use(rank, StepSettings(order=(1, 0)))
    assert buckets(rank) == before


def test_the_algorithm_changes_between_two_steps_and_back() -> None:
    members = [Rank(c, GradientAllreduce()) for c in world_on_nodes([1, 1])]
    always = [Rank(c, ByteGrad(hierarchical=False)) for c in world_on_nodes([1, 1])]
    for settings in (AS_SCRIPTED, COMPRESSED, AS_SCRIPTED):
        for member in members:
            use(member, settings)
        # a fresh world that has had this algorithm from its beginning computes the same from the same parameters
        steady = (
            always if settings.algorithm else [Rank(c, GradientAllreduce()) for c in world_on_nodes([1, 1])]
        )
        for one, other in zip(members, steady, strict=True):
            with torch.no_grad():
                for p, q in zip(other.inner.parameters(), one.inner.parameters(), strict=True):
                    p.copy_(q)
            other.optimizer.load_state_dict(one.optimizer.state_dict())
        for several in (members, steady):
            assert all(run_ranks(several, lambda r: r.step()))
        assert_equal_bits([m.parameters() for m in [*members, *steady]])


def qadam_optimizer(parameters: Iterable[torch.Tensor]) -> QAdamOptimizer:
    return QAdamOptimizer(parameters, lr=3e-3, warmup_steps=3)


def test_qadam_takes_the_place_of_full_precision_and_gives_it_back() -> None:
    """With QAdam's optimizer the state is the same under both, and what an algorithm kept besides begins anew: from the
    same state a fresh world computes the same bits."""

    def world(algorithm: Algorithm) -> list[Rank]:
        return [Rank(c, algorithm, optimizer=qadam_optimizer) for c in world_on_nodes([1, 1, 1])]

    members = world(GradientAllreduce())
    assert members[0].model.warms_up
    for _ in range(4):
        assert all(run_ranks(members, lambda r: r.step()))
    assert not members[0].model.warms_up
    for settings, steady in (
        (StepSettings(algorithm="qadam"), world(QAdam())),
        (AS_SCRIPTED, world(GradientAllreduce())),
        (StepSettings(algorithm="qadam", hierarchical=False), world(QAdam(hierarchical=False))),
    ):
        for member, other in zip(members, steady, strict=True):
            use(member, settings)
            other.inner.load_state_dict(member.inner.state_dict())
            other.optimizer.load_state_dict(copy.deepcopy(member.optimizer.state_dict()))
        for _ in range(3):
            for several in (members, steady):
                assert all(run_ranks(several, lambda r: r.step()))
            assert_equal_bits([m.parameters() for m in [*members, *steady]])
        exchange = members[0].model._exchange
        assert isinstance(exchange, Reducer)
        assert isinstance(exchange._operation, MomentumSum) is bool(settings.algorithm)


def equal_layers() -> nn.Module:
    """Three of one shape. Each has a bucket of its own, whatever their order is."""
    sizes = [70, 300, 300, 300, 300, 3]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


@pytest.mark.parametrize(
    ("build", "order", "same_bits"),
    [(net, (4, 3, 2, 1, 0, 5), False), (equal_layers, (4, 1, 3, 2, 0), True)],
    ids=["layers of different shapes", "layers of one shape"],
)
def test_qadam_with_a_measured_order_uses_the_moments_of_each_buckets_own_parameters(
    build: Callable[[], nn.Module], order: tuple[int, ...], same_bits: bool
) -> None:
    def trained(settings: StepSettings) -> list[list[torch.Tensor]]:
        members = [Rank(c, QAdam(), build, optimizer=qadam_optimizer) for c in world_on_nodes([1, 1])]
        for step in range(8):
            if step == 5:  # it is warm
                for member in members:
                    use(member, settings)
            assert all(run_ranks(members, lambda r: r.step()))
        return [member.parameters() for member in members]

    ordered = trained(StepSettings(order=order))
    assert_equal_bits(ordered)
    if same_bits:
        as_registered = trained(StepSettings(order=tuple(reversed(range(len(order))))))
        assert_equal_bits([*ordered, *as_registered])


def test_a_job_that_declares_qadam_leaves_it_and_comes_back_with_its_bits() -> None:
    declared = QAdam(bits=1, hierarchical=False)
    plain = tuned(declared, StepSettings(algorithm="gradient_allreduce"))
    assert plain is not None and plain.described == "gradient_allreduce"
    back = tuned(declared, StepSettings(bucket_bytes=4096))
    assert back is not None and back.described == declared.described


def test_what_the_declared_qadam_cannot_take_on_is_refused_under_another_algorithm_too() -> None:
    """Otherwise the error would come when the settings give qadam back, at some later step."""

    def partly_frozen() -> nn.Module:
        made = net()
        next(made.parameters()).requires_grad_(False)
        return made

    rank = Rank(None, QAdam(), partly_frozen, optimizer=qadam_optimizer)
    assert rank.step()
    use(rank, StepSettings(algorithm="gradient_allreduce"))
    assert rank.step()
    next(rank.inner.parameters()).requires_grad_(True)
    with pytest.raises(CannotTakeOn, match=r"0\.weight"):
        rank.step()


def test_what_was_frozen_after_the_model_was_wrapped_trains_again_under_each_algorithm() -> None:
    """While gradient_allreduce stands for qadam the buckets are laid out without the frozen parameters."""
    members = [Rank(c, QAdam(), optimizer=qadam_optimizer) for c in in_process_world(2)]

    def steps(algorithm: str | None, count: int, trains: bool) -> None:
        for member in members:
            if algorithm is not None:
                use(member, StepSettings(algorithm=algorithm))
            next(member.inner.parameters()).requires_grad_(trains)
        for _ in range(count):
            assert all(run_ranks(members, lambda member: member.step()))

    steps("qadam", 1, True)
    steps("gradient_allreduce", 1, True)
    steps(None, 4, False)
    before = [p.detach().clone() for p in members[0].inner.parameters()]
    steps(None, 3, True)
    steps("qadam", 3, True)
    after = [list(member.inner.parameters()) for member in members]
    assert not torch.equal(after[0][0], before[0])
    assert_equal_bits(after)


@pytest.mark.parametrize(
    ("declared", "optimizer", "why"),
    [
        (GradientAllreduce(), None, "needs bagua.algorithms.QAdamOptimizer"),
        (GradientAllreduce(average=False), qadam_optimizer, "asks for their sum"),
        (
            GradientAllreduce(),
            lambda parameters: qadam_optimizer(list(parameters)[:-1]),
            "are not its QAdamOptimizer's",
        ),
    ],
)
def test_a_model_that_cannot_take_qadam_says_why_and_goes_on_with_the_rest(
    declared: Algorithm, optimizer: Callable[..., torch.optim.Optimizer] | None, why: str
) -> None:
    rank = Rank(None, declared, **({} if optimizer is None else {"optimizer": optimizer}))
    before = len(buckets(rank))
    assert why in rank.model.use_settings(StepSettings(algorithm="qadam", bucket_bytes=1 << 24))
    rank.model.communicator_changed()
    assert len(buckets(rank)) < before, "the size of buckets is followed"
    assert rank.step()


def test_a_gradient_that_was_accumulated_moves_with_its_bucket() -> None:
    """.grad lies in a bucket, and the script adds the next step's to it."""
    rank = Rank(None, GradientAllreduce())
    rank.backward()
    kept = rank.gradients()
    use(rank, WHOLE)
    assert_equal_bits([kept, rank.gradients()])


def test_settings_reach_nodes_of_several_workers() -> None:
    members = [Rank(c, GradientAllreduce()) for c in world_on_nodes([2, 1])]
    for member in members:
        use(member, StepSettings(hierarchical=True))
    mean, _ = exact(Rank(None, GradientAllreduce()), 3)
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    for got, want in zip(members[0].gradients(), mean, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
