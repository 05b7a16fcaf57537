"""Results depend neither on threads nor on the processor's modes, and a forked child computes too."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bagua_core.kernels as kernels
from bagua_core.kernels.fallback import FallbackKernels
from bagua_core.kernels.on_cpu import CpuKernels
from tests.core.kernels.conftest import serve
from tests.core.kernels.samples import normal
from tests.lab.wait import HANG_S

COUNT = 300_007
CHILD_DEADLINE_S = 60


def everything(count: int = COUNT) -> list[Tensor]:
    """A result of every kernel."""
    x = torch.stack([normal(count, torch.float32, seed=s) for s in range(3)])
    half, error = x[0].to(torch.bfloat16), normal(count, torch.float32, seed=7)
    bytes_, bits = kernels.minmax_compress(x), kernels.one_bit_compress(half, error)
    out = torch.empty(count, dtype=torch.float16)
    second, after, parameter, first = x[0].square(), torch.empty(count), x[1].clone(), x[2].clone()
    return [
        bytes_,
        bits,
        error,
        kernels.minmax_reduce(bytes_, count, scale=1 / 3),
        kernels.minmax_reduce_values(bytes_, out.clone(), scale=1 / 3),
        kernels.minmax_decompress(bytes_, torch.empty_like(x)),
        kernels.one_bit_decompress(bits, half.clone(), add=True),
        kernels.flatten([half[:1000], half[1000:]], dtype=torch.float32),
        kernels.weighted_average(x[0].clone(), half, 0.25, 0.75),
        kernels.add_difference(x[1].clone(), x[0], x[2], 0.5),
        kernels.adam_steps(x[1].clone(), second, 1e-3, 8.0, before=x[2], after=after, decay=0.9),
        after,
        kernels.adam_gradients(x[1].clone(), second, 1e-3),
        kernels.adam_update(parameter, x[0], first, second, share=0.1, weight_decay=0.1, eps=1e-3, rate=0.1),
        first,
    ]


def assert_all_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.fixture
def expected(extension: CpuKernels) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        serve(patch, FallbackKernels(), "fallback")
        return everything()


@pytest.fixture(autouse=True)
def served(extension: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, extension, "extension")


def test_any_number_of_threads(expected: list[Tensor]) -> None:
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        assert_all_same(everything(), expected)


def test_callers_at_once(expected: list[Tensor]) -> None:
    torch.set_num_threads(3)
    start = threading.Barrier(4)
    found: list[list[Tensor]] = []

    def call() -> None:
        start.wait(timeout=HANG_S)
        found.append(everything())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=HANG_S)
    assert len(found) == 4
    for results in found:
        assert_all_same(results, expected)


def in_child(work: Callable[[], None]) -> int:
    """Exit code of a forked child that did `work`; an alarm ends one that hangs."""
    import signal

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(CHILD_DEADLINE_S)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - a child must not return into pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Without torch, whose own threads do not survive a fork."""
    return bool((one.numpy() == other.numpy()).all())


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_forked_child_has_helpers_of_its_own() -> None:
    torch.set_num_threads(3)
    values = normal(COUNT, torch.float32)
    expected = kernels.minmax_compress(values)  # the parent has its helpers from here on
    out = torch.empty_like(expected)

    def compress() -> None:
        others = threads_of_this_process()  # this one, and what other libraries begin in a child
        assert same_bytes(kernels.minmax_compress(values, out), expected)
        assert threads_of_this_process() == others + 2

    assert in_child(compress) == 0
    assert torch.equal(kernels.minmax_compress(values), expected)


def test_a_fork_amid_a_call_harms_neither() -> None:
    torch.set_num_threads(3)
    values = normal(4_000_000, torch.float32)
    expected = kernels.minmax_compress(values)
    stop = threading.Event()
    calls = 0

    def keep_calling() -> None:
        nonlocal calls
        while not stop.is_set():
            kernels.minmax_compress(values)
            calls += 1

    caller = threading.Thread(target=keep_calling)
    caller.start()
    try:
        out = torch.empty_like(expected)

        def compress() -> None:
            assert same_bytes(kernels.minmax_compress(values, out), expected)

        for _ in range(20):
            assert in_child(compress) == 0
    finally:
        stop.set()
        caller.join(timeout=HANG_S)
    assert calls > 0 and not caller.is_alive()


def test_flushed_denormals_change_nothing() -> None:
    values = torch.linspace(-1, 1, 200) * 2.0**-126
    expected = kernels.weighted_average(values.clone(), values, 0.5, 0.25)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert torch.equal(torch.tensor([1e-40]) * 1.0, torch.zeros(1)), "the mode is not on"
        found = kernels.weighted_average(values.clone(), values, 0.5, 0.25)
        assert torch.equal(torch.tensor([1e-40]) * 1.0, torch.zeros(1)), "the mode did not come back"
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)
    assert bool(found.any())
