"""Communication hooks, torch's own and others: the job's mean, one order on all ranks, and nothing of a failed step."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from bagua_core.algorithms import GradientAllreduce, Hook
from bagua_core.algorithms.hook_state import HookState, HookStateError
from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction.hook_group import HookError
from bagua_core.torch_api import torch_default_group
from tests.core.algorithms.gradient_ranks import Rank, assert_equal_bits, break_at, exact
from tests.core.communication.worlds import gloo_world, in_process_world, run_ranks


class _Pair(NamedTuple):
    number: int
    other: object


POWER_SGD_FROM = 2  # the step from which it compresses


@pytest.fixture(autouse=True)
def _one_rank_at_a_time_seeds_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and PowerSGD draws its first matrices from the process's own generator."""
    lock, real = threading.Lock(), torch.random.fork_rng

    @contextmanager
    def fork_rng(*arguments: Any, **keywords: Any) -> Iterator[None]:
        with lock, real(*arguments, **keywords):
            yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWER_SGD_FROM, min_compression_rate=1)


def mean(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(group, bucket)


def waits_for_it(group: Any, bucket: Any) -> torch.Tensor:
    dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group)
    return bucket.buffer()  # type: ignore[no-any-return]


def power_ranks(world: list[Communicator]) -> tuple[list[Rank], list[powerSGD_hook.PowerSGDState]]:
    states = [power_sgd() for _ in world]
    members = [Rank(c, Hook(powerSGD_hook.powerSGD_hook, s)) for c, s in zip(world, states, strict=True)]
    exchange: Any = members[0].model._exchange
    assert len(exchange.buckets_of_parameters()) > 2, (
        "or the order of several buckets' collectives is not tested"
    )
    return members, states


def assert_close_to_mean(member: Rank, world_size: int, tolerance: float) -> None:
    wanted, _ = exact(Rank(None, GradientAllreduce()), world_size)
    for got, want in zip(member.gradients(), wanted, strict=True):
        scale = float(want.abs().max())
        torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=tolerance * max(scale, 1e-6))


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (mean, 1e-5),
        (waits_for_it, 1e-5),
        (default_hooks.fp16_compress_hook, 3e-3),
        (default_hooks.bf16_compress_hook, 3e-2),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_hook_gives_the_mean_over_uneven_shares(hook: Any, tolerance: float, size: int) -> None:
    members = [Rank(c, Hook(hook)) for c in gloo_world(size)]
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    assert_close_to_mean(members[0], size, tolerance)


def test_a_world_of_one_calls_the_hook_too() -> None:
    member = Rank(None, Hook(lambda group, bucket: bucket.buffer().mul_(2)))
    member.backward()
    once = [g / 2 for g in member.gradients()]
    plain = Rank(None, GradientAllreduce())
    plain.backward()
    torch.testing.assert_close(once, plain.gradients())


def test_power_sgd_over_several_buckets_compresses_alike_on_all_ranks() -> None:
    members, states = power_ranks(list(gloo_world(3)))
    for step in range(POWER_SGD_FROM + 3):
        assert run_ranks(members, lambda r: r.step()) == [True] * 3
        assert_equal_bits([m.parameters() for m in members])
        matrices = [g for g in members[0].gradients() if g.dim() == 2 and min(g.shape) > 1]
        if step >= POWER_SGD_FROM:
            assert all(torch.linalg.matrix_rank(m, rtol=1e-4) == 1 for m in matrices), "compressed to rank 1"
    assert {s.iter for s in states} == {POWER_SGD_FROM + 3}
    errors = [next(iter(s.error_dict.values())) for s in states]
    assert not torch.equal(errors[0], errors[1]), "each rank has errors of its own"


@pytest.mark.parametrize("number", [1, 4, 8])
def test_a_failed_step_leaves_a_state_as_it_was(number: int) -> None:
    world = list(in_process_world(2))
    members, states = power_ranks(world)
    for _ in range(POWER_SGD_FROM + 1):
        run_ranks(members, lambda r: r.step())
    before = [HookState(s, ()).state_dict()["fields"] for s in states]
    kept = [{k: {n: t.clone() for n, t in b[k].items()} for k in b if k.endswith("_dict")} for b in before]
    happened = break_at(world, "allreduce", number)
    assert run_ranks(members, lambda r: r.step()) == [False, False]
    assert happened.is_set()
    again = list(in_process_world(2))
    for member, communicator in zip(members, again, strict=True):
        member.move_to(communicator)
    for state, was in zip(states, kept, strict=True):
        for name, values in was.items():
            assert_equal_bits([list(getattr(state, name).values()), list(values.values())])
    undisturbed, _ = power_ranks(list(in_process_world(2)))
    for _ in range(POWER_SGD_FROM + 2):
        run_ranks(undisturbed, lambda r: r.step())
    assert run_ranks(members, lambda r: r.step()) == [True, True]
    assert_equal_bits([members[0].parameters(), undisturbed[0].parameters()])


def test_a_step_in_which_a_worker_copies_the_state_is_averaged_without_the_hook() -> None:
    world = list(in_process_world(2))
    members, states = power_ranks(world)
    for _ in range(POWER_SGD_FROM + 1):
        run_ranks(members, lambda r: r.step())
    errors = [{n: t.clone() for n, t in s.error_dict.items()} for s in states]
    for member in members:
        member.engine.healing = frozenset({1})
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    assert any(
        torch.linalg.matrix_rank(g) > 1 for g in members[0].gradients() if g.dim() == 2 and min(g.shape) > 1
    )
    for state, was in zip(states, errors, strict=True):
        assert_equal_bits([list(state.error_dict.values()), list(was.values())])


def test_a_worker_that_copies_the_state_begins_with_errors_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members, states = power_ranks(list(in_process_world(2)))
    for _ in range(POWER_SGD_FROM + 1):
        run_ranks(members, lambda r: r.step())
    monkeypatch.setenv("BAGUA_WORKER_ID", "holder")
    (held,) = members[0].engine.registered.values()
    kept = held.state_dict()
    monkeypatch.setenv("BAGUA_WORKER_ID", "joiner")
    fresh = power_sgd()
    HookState(fresh, ("error_dict",)).load_state_dict(kept)
    assert fresh.iter == states[0].iter and fresh.error_dict == {}
    assert_equal_bits([list(fresh.q_memory_dict.values()), list(states[0].q_memory_dict.values())])
    assert fresh.rng.randint(1 << 30) == states[0].rng.randint(1 << 30)
    monkeypatch.setenv("BAGUA_WORKER_ID", "holder")
    HookState(fresh, ("error_dict",)).load_state_dict(kept)
    assert_equal_bits([list(fresh.error_dict.values()), list(states[0].error_dict.values())])


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda group, bucket: "nothing", "returns a tensor like bucket.buffer"),
        (lambda group, bucket: torch.zeros(1), "returns a tensor like bucket.buffer"),
        (lambda group, bucket: torch.futures.Future(), "has no value once its collectives are done"),
        (
            lambda group, bucket: dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.BAND, group=group),
            "all_reduce with .* is not possible in a hook",
        ),
    ],
)
def test_what_a_hook_can_not_do_is_said(hook: Any, words: str) -> None:
    member = Rank(None, Hook(hook))
    with pytest.raises(HookError, match=words):
        member.backward()


def test_a_state_that_the_job_can_not_keep_is_named() -> None:
    state = HookState(SimpleNamespace(count=1, log=io.StringIO()), ())
    with pytest.raises(HookStateError, match="field 'log' of a hook's state holds a StringIO"):
        state.state_dict()
    with pytest.raises(HookStateError, match="an object with fields, not int"):
        HookState(3, ())


@pytest.mark.parametrize("value", [{"a": np.random.RandomState(1)}, _Pair(1, io.StringIO())])
def test_what_would_come_back_as_something_else_is_refused_within_containers_too(value: object) -> None:
    state = HookState(SimpleNamespace(field=value), ())
    with pytest.raises(
        HookStateError, match=r"field 'field' of a hook's state holds a (RandomState|StringIO)"
    ):
        state.state_dict()


def test_a_state_serves_one_model_at_a_time() -> None:
    hook = Hook(powerSGD_hook.powerSGD_hook, power_sgd())
    first = Rank(None, hook)
    with pytest.raises(ValueError, match="state serves one model"):
        Rank(None, hook)
    exchange: Any = first.model._exchange
    exchange.close()
    Rank(None, hook)


def test_a_hook_may_wait_for_what_a_callback_makes() -> None:
    """No other thread could complete it."""

    def waits(group: Any, bucket: Any) -> torch.Tensor:
        summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        mean: torch.Tensor = (
            summed.then(lambda f: f.value()[0].div_(group.size())).then(lambda f: f.wait()).wait()
        )
        return mean

    members = [Rank(c, Hook(waits)) for c in gloo_world(2)]
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    assert_close_to_mean(members[0], 2, 1e-5)


def test_a_callback_finds_the_group_of_its_own_bucket_in_the_state() -> None:
    """It begins another collective and waits for nothing, while collectives of later buckets are under way."""

    class State:
        def __init__(self) -> None:
            self.process_group: Any = None
            self.divides = 2

    def halves(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        buffer = bucket.buffer()

        def allreduce(tensor: torch.Tensor) -> Any:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=state.process_group, async_op=True)
            return work.get_future()

        def second(_: object) -> None:
            allreduce(buffer[half:]).then(lambda _: found.set_result(buffer))

        half = buffer.numel() // state.divides
        allreduce(buffer[:half]).then(second)
        return found

    members = [Rank(c, Hook(halves, State())) for c in gloo_world(2)]
    run_ranks(members, lambda r: r.backward())
    assert_close_to_mean(members[0], 2, 1e-5)


def test_a_callback_that_raises_is_the_scripts_own_error() -> None:
    def raises(group: Any, bucket: Any) -> Any:
        summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return summed.then(lambda f: 1 / 0)

    with pytest.raises(Exception, match="division by zero"):
        Rank(None, Hook(raises)).backward()


def test_a_mistake_in_a_later_bucket_is_the_scripts_own_error_and_no_lost_network() -> None:
    def raises(group: Any, bucket: Any) -> Any:
        if bucket.index() == 1:
            raise ValueError("the hook's own mistake")
        return default_hooks.allreduce_hook(group, bucket)

    members = [Rank(c, Hook(raises)) for c in in_process_world(2)]

    def step(member: Rank) -> str:
        with pytest.raises(Exception, match="own mistake") as error:
            member.backward()
        return type(error.value).__name__

    assert "CollectiveFailed" not in run_ranks(members, step)
    assert not any(member.engine.step_failed for member in members)


def test_it_works_where_the_originals_surface_has_replaced_torchs_functions() -> None:
    torch_default_group.take_over()
    try:
        member = Rank(None, Hook(default_hooks.bf16_compress_hook))
        member.backward()
    finally:
        torch_default_group.give_back()
    assert_close_to_mean(member, 1, 3e-2)


def test_its_settings_are_part_of_the_fingerprint() -> None:
    one, other = power_sgd(), powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4)
    described = [Hook(powerSGD_hook.powerSGD_hook, s).described for s in (one, power_sgd(), other)]
    assert described[0] == described[1] != described[2]
