"""Builds the algorithm and the optimizer that a name in a benchmark denotes.

The one place where benchmarks build Bagua's algorithms. Independent of jobs and measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bagua_core.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    GradientAllreduce,
    Hook,
    LocalSGD,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    StreamingDiLoCo,
)
from bagua_core.algorithms.async_model_average import DEFAULT_INTERVAL_MS
from bagua_core.algorithms.local_sgd import DEFAULT_SYNC_EVERY
from bagua_core.algorithms.streaming_diloco import DEFAULT_SYNC_EVERY as DILOCO_SYNC_EVERY


@dataclass(frozen=True, slots=True)
class Settings:
    """What a benchmark sets itself. optimizer: "sgd" or "adam", for all but QAdam, which is Adam's. hierarchical: False
    where all workers are on one node, or the compressed and decentralized ones would have no peer."""

    optimizer: str
    lr: float
    adam_lr: float
    momentum: float = 0.0
    qadam_warmup_steps: int = 5
    power_sgd_start: int = 10  # steps with whole gradients before PowerSGD
    async_interval_ms: int = DEFAULT_INTERVAL_MS
    sync_every: int = DEFAULT_SYNC_EVERY
    diloco_every: int = DILOCO_SYNC_EVERY
    hierarchical: bool = True

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer={self.optimizer!r} is unknown; use sgd or adam")


HOOKED = "ddp_powersgd"  # torch's DDP with the hook of the choice power_sgd
# For HOOKED: PowerSGD starts collectives from other threads as earlier ones end. With several buckets their order
# differs between ranks, which Gloo takes for a mismatch; and what it sends needs no overlap.
ONE_BUCKET_MB = 4096

Parameters = list[torch.nn.Parameter]
Built = tuple[torch.optim.Optimizer, Algorithm]
Choice = Callable[[Parameters, Settings], Built]


def plain_optimizer(parameters: Iterable[torch.nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=settings.adam_lr)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)


def _plain(make: Callable[[Settings], Algorithm]) -> Choice:
    return lambda parameters, settings: (plain_optimizer(parameters, settings), make(settings))


def _qadam(bits: int | None) -> Choice:
    """bits None: its optimizer with whole gradients, which shows what the compression alone does."""

    def build(parameters: Parameters, settings: Settings) -> Built:
        optimizer = QAdamOptimizer(parameters, lr=settings.adam_lr, warmup_steps=settings.qadam_warmup_steps)
        if bits is None:
            return optimizer, GradientAllreduce()
        return optimizer, QAdam(optimizer, hierarchical=settings.hierarchical, bits=bits)

    return build


def power_sgd_hook(settings: Settings) -> tuple[Callable[..., Any], Any]:
    """torch's hook, of rank 1, and its state."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # late: it needs NumPy

    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=settings.power_sgd_start)
    return powerSGD_hook.powerSGD_hook, state


def _power_sgd(parameters: Parameters, settings: Settings) -> Built:
    return plain_optimizer(parameters, settings), Hook(*power_sgd_hook(settings))


def _diloco_rounds(compress: str) -> Choice:
    return _plain(
        lambda s: LocalSGD(s.diloco_every, outer_optimizer="nesterov", compress=compress, unit="round")
    )


CHOICES: dict[str, Choice] = {
    "gradient_allreduce": _plain(lambda _: GradientAllreduce()),
    "bytegrad": _plain(lambda s: ByteGrad(s.hierarchical)),
    "decentralized": _plain(lambda s: Decentralized(s.hierarchical, "all")),
    "decentralized_shift_one": _plain(lambda s: Decentralized(s.hierarchical, "shift_one")),
    "low_precision_decentralized": _plain(lambda s: LowPrecisionDecentralized(s.hierarchical)),
    "qadam_uncompressed": _qadam(None),
    "qadam_8bit": _qadam(8),
    "qadam_1bit": _qadam(1),
    "power_sgd": _power_sgd,
    "async": _plain(lambda s: AsyncModelAverage(sync_interval_ms=s.async_interval_ms)),
    "local_sgd": _plain(lambda s: LocalSGD(s.sync_every)),
    "diloco_rounds_uint8": _diloco_rounds("uint8"),
    "diloco_rounds_int4": _diloco_rounds("int4"),
    "streaming_diloco": _plain(lambda s: StreamingDiLoCo(s.diloco_every)),
    "streaming_diloco_int4": _plain(lambda s: StreamingDiLoCo(s.diloco_every, compress="int4")),
}
# The round is their unit of commit: their workers take different numbers of steps.
IN_ROUNDS = frozenset({"diloco_rounds_uint8", "diloco_rounds_int4"})
ALWAYS_ADAM = frozenset({"qadam_uncompressed", "qadam_8bit", "qadam_1bit"})


def rounds_of(model: Any) -> int | None:
    """Background rounds that have come in on this worker, of an algorithm that has such; else None."""
    # no part of the model's interface: only who measures wants to know
    return getattr(model._exchange, "rounds", None)
