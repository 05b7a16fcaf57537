"""Defines the base class of algorithms: a name with arguments, which attaches to a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua_core.communication.communicator import Lane
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.step_interface import StepEngine
from bagua_core.model.shard_buffers import ShardBuffers


@dataclass(frozen=True, slots=True)
class Attachment:
    """The model that an algorithm acts on.

    parameters: those that need gradients, in registration order, each once.
    shard_buffers: the model's, in a deterministic job; else None.
    """

    parameters: tuple[torch.nn.Parameter, ...]
    optimizers: Sequence[torch.optim.Optimizer]
    engine: StepEngine
    bucket_cap_bytes: int
    find_unused_parameters: bool = False
    shard_buffers: ShardBuffers | None = None


class Algorithm(ABC):
    """The base class of algorithms. An object holds arguments only, so one object may be given to several models."""

    name: ClassVar[str]

    equal_states: ClassVar[bool] = True
    """Whether all ranks hold the same parameters after each step. If not, digests are not compared, a joiner copies
    from one holder instead of all, and `Exchange.finish` averages the replicas at the end."""

    @property
    def round_steps(self) -> int | None:
        """The number of local steps in a round for a worker of average speed, if the round is the unit of commit: then
        workers share nothing until a round ends (Exchange.close_round). None: every step is committed by all workers.
        """
        return None

    @property
    def has_fixed_order(self) -> bool:
        """Whether the algorithm can sum shards in an order that is independent of the workers, as deterministic jobs
        do."""
        return False

    @property
    def lanes(self) -> frozenset[Lane]:
        """The lanes, beside the main communicator, that every generation must bring."""
        return frozenset()

    @property
    def described(self) -> str:
        """The name and the arguments that must agree on all workers. They are part of the fingerprint."""
        return self.name

    @abstractmethod
    def attach(self, attachment: Attachment) -> Exchange:
        """Begins to act on the gradients and parameters, and returns the exchange that does so. Raises ValueError for a
        model that the algorithm cannot act on."""
