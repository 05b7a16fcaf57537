"""Provides asynchronous model averaging: every worker trains by itself, and models are averaged in the background."""

from __future__ import annotations

from torch import nn

from bagua_core import algorithms as core
from bagua_core.algorithms.async_model_average import AsyncExchange
from bagua_core.torch_api.algorithms.base import BuiltIn

__all__ = ["AsyncModelAverageAlgorithm"]


class AsyncModelAverageAlgorithm(BuiltIn):
    """Declares bagua_core.algorithms.AsyncModelAverage, whose arguments it takes. Nothing needs to be ended by hand: a
    round under way when the script ends is given up, and the replicas are averaged."""

    equal_states = False

    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0
    ) -> None:
        self._core = core.AsyncModelAverage(
            peer_selection_mode=peer_selection_mode,
            sync_interval_ms=sync_interval_ms,
            warmup_steps=warmup_steps,
        )

    def abort(self, model: nn.Module) -> None:
        """Begins no further round for `model`; one under way still comes in. Parameters change only when a training
        forward begins, so evaluation is safe either way. Raises ValueError."""
        _exchange_of(model).pause()

    def resume(self, model: nn.Module) -> None:
        """Lets rounds for `model` begin again after `abort`."""
        _exchange_of(model).resume()


def _exchange_of(model: nn.Module) -> AsyncExchange:
    from bagua_core.torch_api.wrapping import wrapped  # late: wrapping knows all algorithms

    exchange = wrapped(model).exchange
    if not isinstance(exchange, AsyncExchange):
        raise ValueError(f"this {type(model).__name__} is not trained by AsyncModelAverageAlgorithm")
    return exchange
