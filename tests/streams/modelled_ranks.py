"""Workers on modelled devices: real reducer, algorithms, operation queue and NcclCommunicator, in one thread a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua_core.algorithms import Algorithm
from bagua_core.algorithms.qadam import QAdam
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.communication.communicator import Communicator, Lane
from bagua_core.communication.transports.by_device import ByDevice
from bagua_core.model.sharded_tensors import local
from tests.core.algorithms.gradient_ranks import Rank, X, Y, net
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import run_ranks
from tests.streams.device_model import DeviceModel
from tests.streams.watching import belonging_to, nccl_world

SCRIPT = "script"


class ModelledRank:
    """One worker: a model of its device, and what trains on it."""

    def __init__(
        self,
        device: DeviceModel,
        communicator: Communicator,
        algorithm: Algorithm | Callable[[torch.optim.Optimizer], Algorithm],
        build: Callable[[], Any] = net,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1),
    ) -> None:
        self.device = device
        self.communicator = communicator
        self.rank = Rank(communicator, algorithm, build, optimizer=optimizer)
        for parameter in self.rank.inner.parameters():
            device.tag(local(parameter.data), "parameter")
        for buffer in self.rank.inner.buffers():
            device.tag(buffer, "buffer")
        for number, bucket in enumerate(getattr(self.exchange, "_buckets", [])):
            device.tag(bucket.flat, f"bucket {number}")
        for tensor in (X, Y):
            device.tag(tensor, "data")
        self.steps_waits: list[list[str]] = []

    @property
    def exchange(self) -> Any:
        return self.rank.model._exchange

    def step(self, stream: str = SCRIPT) -> bool:
        with belonging_to(self.device), self.device.on(stream):
            before = len(self.device.host_waits)
            happened = self.rank.step()
            self.steps_waits.append(self.device.host_waits[before:])
            return happened


def world(
    size: int,
    algorithm: Callable[[], Algorithm],
    build: Callable[[], Any] = net,
    lanes: frozenset[Lane] = frozenset(),
) -> list[ModelledRank]:
    """lanes: each of all ranks."""
    devices = [DeviceModel(index=rank + 1) for rank in range(size)]
    communicators = nccl_world(devices)
    flags = [c.abort_flag for c in communicators]
    for lane in lanes:
        of_gpu, of_cpu = nccl_world(devices, flags), build_in_process(size, abort_flags=flags)
        for main, gpu, cpu in zip(communicators, of_gpu, of_cpu, strict=True):
            main.lanes = {**main.lanes, lane: ByDevice(cpu, gpu)}
    return [
        ModelledRank(device, communicator, algorithm(), build)
        for device, communicator in zip(devices, communicators, strict=True)
    ]


def world_with_qadam(size: int, bits: int, build: Callable[[], Any] = net) -> list[ModelledRank]:
    """Two steps of warm-up."""
    devices = [DeviceModel(index=rank + 1) for rank in range(size)]
    return [
        ModelledRank(
            device,
            communicator,
            lambda optimizer: QAdam(optimizer, hierarchical=False, bits=bits),  # type: ignore[arg-type]
            build,
            optimizer=lambda ps: QAdamOptimizer(ps, lr=0.01, warmup_steps=2),
        )
        for device, communicator in zip(devices, nccl_world(devices), strict=True)
    ]


def two_nodes(algorithm: Callable[[], Algorithm]) -> list[ModelledRank]:
    """Four ranks, two a node, with the lanes that hierarchical algorithms ask for."""
    devices = [DeviceModel(index=rank + 1) for rank in range(4)]
    communicators = nccl_world(devices)
    flags = [c.abort_flag for c in communicators]
    leaders = nccl_world([devices[0], devices[2]], [flags[0], flags[2]])
    for node in (0, 1):
        ranks = (2 * node, 2 * node + 1)
        lane = nccl_world([devices[r] for r in ranks], [flags[r] for r in ranks])
        for place, rank in enumerate(ranks):
            communicators[rank].nodes = ((0, 1), (2, 3))
            communicators[rank].lanes = {Lane.NODE: lane[place]}
        communicators[ranks[0]].lanes = {Lane.NODE: lane[0], Lane.LEADERS: leaders[node]}
    return [
        ModelledRank(device, communicator, algorithm())
        for device, communicator in zip(devices, communicators, strict=True)
    ]


def train(members: list[ModelledRank], steps: int = 3) -> None:
    """Every rank takes `steps` steps."""
    for _ in range(steps):
        assert all(run_ranks(members, lambda member: member.step()))


def waits_of_steps(members: list[ModelledRank]) -> list[int]:
    """How often the host waited for the device, for each rank and step."""
    return [len(waits) for member in members for waits in member.steps_waits]


def parameters(members: list[ModelledRank]) -> list[list[torch.Tensor]]:
    return [member.rank.parameters() for member in members]
