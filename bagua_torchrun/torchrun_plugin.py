"""Provides the entry point that torch loads. Light: every process that imports torch's elastic package loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "bagua-etcd"


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the creator that torch registers for `--rdzv-backend bagua-etcd`."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from bagua_agent.base.quiet_grpc import keep_quiet

    keep_quiet()  # before gRPC is imported
    from bagua_torchrun.handler import create

    return create(parameters)
