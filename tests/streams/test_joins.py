"""A communicator is made when the kernels of others have ended: aborted with their generation, or drained."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, Lane
from bagua_core.communication.nccl import nccl, nccl_library
from bagua_core.communication.nccl.nccl import NcclCommunicator, build_nccl
from bagua_core.communication.nccl.nccl_end import Aborts
from bagua_core.communication.nccl.nccl_library import Nccl
from tests.core.communication.emulated_nccl import NcclError
from tests.core.communication.worlds import run_ranks
from tests.streams.device_model import DeviceModel
from tests.streams.watching import WatchedHandle, belonging_to, install, nccl_world

LIMIT_S = 60.0  # of a wait that ends at once on a machine with little else to do


class Joins:
    """The library that build_nccl finds. made: how many communicators."""

    def __init__(self, model: DeviceModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self._model = model

        def joined(world_size: int, unique_id: bytes, rank: int) -> Any:
            self.made += 1
            model.joins(f"communicator {self.made}")
            return SimpleNamespace(abort=lambda: None)

        module = SimpleNamespace(
            NcclCommunicator=joined, NcclError=NcclError, get_unique_id=lambda: bytes(128)
        )
        monkeypatch.setattr(nccl_library, "load", lambda: Nccl(module))
        monkeypatch.setattr(nccl_library, "loaded_library", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(nccl, "CudaStream", lambda device: model.new_stream("nccl"))

    def next_generation(self, flag: AbortFlag | None = None) -> NcclCommunicator:
        with belonging_to(self._model):
            return build_nccl(2, 0, 1, HashStore(), torch.device("cpu"), LIMIT_S, flag or AbortFlag())


class SlowAborts:
    """Aborts that return when they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._let_go = threading.Event(), threading.Event()
        abort = WatchedHandle.abort

        def slow(handle: WatchedHandle) -> None:
            self.begun.set()
            assert self._let_go.wait(LIMIT_S)
            abort(handle)

        monkeypatch.setattr(WatchedHandle, "abort", slow)

    def let_go(self) -> None:
        self._let_go.set()


@pytest.fixture
def model() -> DeviceModel:
    return DeviceModel()


@pytest.fixture
def joins(model: DeviceModel, monkeypatch: pytest.MonkeyPatch) -> Joins:
    install(monkeypatch)
    return Joins(model, monkeypatch)


def with_work_under_way(model: DeviceModel) -> NcclCommunicator:
    """Its peer takes part in a collective, and the host has not waited for it."""
    models = [model, DeviceModel(2)]
    world = nccl_world(models)

    def act(rank: int) -> None:
        with belonging_to(models[rank]), models[rank].on("script"):
            tensor = models[rank].tag(torch.ones(4), "gradients")
            world[rank].allreduce(tensor).follow()

    run_ranks([0, 1], act)
    return world[0]


def in_background(call: Callable[[], Any]) -> tuple[ThreadPoolExecutor, Future[Any]]:
    pool = ThreadPoolExecutor(1)
    return pool, pool.submit(call)


def test_a_failover_joins_when_its_aborts_have_returned(
    model: DeviceModel, joins: Joins, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowAborts(monkeypatch)
    lost = with_work_under_way(model)
    with belonging_to(model):
        lost.abort("a peer is gone")
    assert slow.begun.wait(LIMIT_S)
    pool, building = in_background(joins.next_generation)
    with pool:
        with pytest.raises(TimeoutError):
            building.result(0.2)
        assert joins.made == 0
        slow.let_go()
        building.result(LIMIT_S)
    assert joins.made == 2 and model.violations == []


def test_without_that_wait_the_checker_reports_it(
    model: DeviceModel, joins: Joins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Aborts, "wait", lambda aborts, flag: None)
    slow = SlowAborts(monkeypatch)
    lost = with_work_under_way(model)
    with belonging_to(model):
        lost.abort("a peer is gone")
    joins.next_generation()
    slow.let_go()
    assert any("is made beside work of nccl" in violation for violation in model.violations)


def test_a_generation_that_is_given_up_does_not_wait_for_aborts(
    model: DeviceModel, joins: Joins, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowAborts(monkeypatch)
    lost = with_work_under_way(model)
    with belonging_to(model):
        lost.abort("a peer is gone")
    flag = AbortFlag()
    pool, building = in_background(lambda: joins.next_generation(flag))
    with pool:
        flag.set("another loss")
        with pytest.raises(CollectiveAborted, match="another loss"):
            building.result(LIMIT_S)
    slow.let_go()
    assert joins.made == 0


@pytest.mark.parametrize("drains", [True, False])
def test_a_planned_generation_joins_when_the_one_in_force_is_drained(
    model: DeviceModel, joins: Joins, drains: bool
) -> None:
    in_force = with_work_under_way(model)
    if drains:
        with belonging_to(model), model.on("script"):
            for pending in in_force.drain():
                pending.wait()
    joins.next_generation()
    assert joins.made == 2 and any("is made beside work of nccl" in v for v in model.violations) is not drains
    with belonging_to(model):
        in_force.abort("the test is over")


def test_a_communicator_drains_its_lanes_and_none_that_was_aborted(model: DeviceModel, joins: Joins) -> None:
    main, lane = with_work_under_way(model), with_work_under_way(model)
    main.lanes = {Lane.STATISTICS: lane}
    with belonging_to(model), model.on("script"):
        for pending in main.drain():
            pending.wait()
        joins.next_generation()
        assert model.violations == []
        lane.abort("its algorithm is over")
        main.abort("the test is over")
        assert all(pending.is_done() for pending in main.drain())
