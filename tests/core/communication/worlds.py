"""Worlds of communicators inside the test's process, one thread a rank; an engine that only takes notes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore

from bagua_core.communication.communicator import AbortFlag, CollectiveFailed, Communicator, Pending
from bagua_core.communication.reduction.reported_loss import LOSS, JobLoss, contribution, job_loss
from bagua_core.communication.step_interface import DataSource, MicroBatch, Model, Stateful, StepPlan
from bagua_core.communication.transports.gloo import GlooCommunicator, build_gloo
from tests.core.communication.in_process import build_in_process

DEADLINE_S = 10.0
T = TypeVar("T")


def run_ranks(world: Sequence[Any], act: Callable[[Any], T]) -> list[T]:
    """act(member) in a thread each; results in rank order, the first error raised.

    A rank that waits for one that failed is left waiting, in a thread that keeps no process from ending.
    """
    futures: list[Future[T]] = [Future() for _ in world]

    def run(member: Any, future: Future[T]) -> None:
        try:
            future.set_result(act(member))
        except BaseException as error:  # noqa: BLE001  raised by the caller
            future.set_exception(error)

    for member, future in zip(world, futures, strict=True):
        threading.Thread(target=run, args=(member, future), daemon=True).start()
    wait(futures, DEADLINE_S)
    for future in futures:
        if future.done():
            future.result()  # the failure, before those that wait for it
    return [future.result(0) for future in futures]


def gloo_world(world_size: int, generation: int = 1, timeout_s: float = 8.0) -> list[GlooCommunicator]:
    # not a TCPStore: for every connection to one torch asks the resolver for a name, and waits
    store = HashStore()

    def build(global_rank: int) -> GlooCommunicator:
        return build_gloo(generation, global_rank, world_size, store, "127.0.0.1", timeout_s, AbortFlag())

    return run_ranks(range(world_size), build)


def in_process_world(world_size: int, generation: int = 1) -> list[Communicator]:
    return list(build_in_process(world_size, generation))


def await_true(claim: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not claim():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
        pause.wait(0.002)


class FakeEngine:
    """A StepEngine whose step is set by the test."""

    virtual_shards = 0
    answered_collectives = 0

    def __init__(self, communicator: Communicator | None = None, weight: float | None = None) -> None:
        self._communicator = communicator
        world_size = communicator.world_size if communicator else 1
        self.current = MicroBatch(1.0 / world_size if weight is None else weight, True)
        self.failed: Exception | None = None
        self.final = False
        self.pairs: list[tuple[float, float] | None] = []
        self.stalls: list[float] = []
        self.models: list[Model] = []
        self.registered: dict[str, Stateful] = {}
        self.in_step = True
        self.v = 0.0
        self.loss: float | None = None
        self.job_losses: list[JobLoss | None] = []
        self.waits_before_step = 0
        self.final_steps = 0
        self.final_exchanges = 0
        self.parameter_changes = 0
        self.step = 0
        self.healing: frozenset[int] = frozenset()
        self.stall_after_s = 0.5

    def attach_model(self, model: Model) -> None:
        self.models.append(model)

    def detach_model(self, model: Model) -> None:
        self.models.remove(model)

    def shard_place(self) -> tuple[int, int]:
        return 0, 1

    def share_in_replica(self, tensors: Sequence[torch.Tensor]) -> None:
        """A replica of one worker."""

    def attach_source(self, source: DataSource) -> None:
        raise NotImplementedError

    def register_state(self, name: str, stateful: Stateful) -> None:
        self.registered[name] = stateful

    def epoch_begins(self, epoch: int) -> None:
        """As an engine whose script calls no collectives."""

    def epoch_ends(self) -> None:
        """As an engine whose script calls no collectives."""

    def boundary(self, goes_on: bool = False, confirmed: bool = False) -> StepPlan:
        raise NotImplementedError

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        self.current = micro_batch

    def finish(self) -> bool:
        raise NotImplementedError

    @property
    def round_steps(self) -> int | None:
        return next((model.round_steps for model in self.models), None)

    @property
    def micro_batch(self) -> MicroBatch:
        if not self.in_step:
            raise RuntimeError("outside a step")
        return self.current

    @property
    def replica_size(self) -> int:
        return 1

    def communicator(self) -> Communicator | None:
        return self._communicator

    @property
    def step_failed(self) -> bool:
        return self.failed is not None

    @property
    def is_final(self) -> bool:
        return self.final

    def switch_value(self) -> float:
        return self.v

    def loss_numbers(self) -> tuple[float, float]:
        return contribution({} if self.loss is None else {LOSS: self.loss})

    def losses_reduced(self, sums: tuple[float, float]) -> None:
        self.job_losses.append(job_loss(sums))

    def reduction_done(self, pair: tuple[float, float] | None) -> None:
        self.pairs.append(pair)

    def reduction_failed(self, error: Exception) -> None:
        assert isinstance(error, CollectiveFailed)
        self.failed = error

    def reduction_given_up(self) -> None:
        pass

    def wait(self, pending: Pending) -> None:
        pending.wait(self.stalls.append, self.stall_after_s)

    def takes_optimizer_step(self, final: bool = True) -> bool:
        self.waits_before_step += 1
        self.final_steps += final
        return True

    def optimizer_step_is_final(self) -> None:
        self.final_steps += 1

    def forward_begins(self) -> None:
        pass

    def backward_begins(self) -> None:
        pass

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def exchange_is_final(self) -> None:
        self.final_exchanges += 1

    def parameters_change(self) -> None:
        self.parameter_changes += 1

    @property
    def plan(self) -> StepPlan:
        communicator = self._communicator
        rank, size = (communicator.global_rank, communicator.world_size) if communicator else (0, 1)
        return StepPlan(1, self.step, rank, size, self.healing)

    def enter(self, communicator: Communicator | None) -> None:
        """Another generation, its first step."""
        self._communicator = communicator
        self.failed = None


def seeded(build: Callable[[], torch.nn.Module], seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()
