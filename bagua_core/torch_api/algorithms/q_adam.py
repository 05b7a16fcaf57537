"""Provides Adam whose momentum travels compressed after a warm-up: the optimizer, and the algorithm that knows it."""

from __future__ import annotations

from bagua_core import algorithms as core
from bagua_core.algorithms import QAdamOptimizer
from bagua_core.torch_api.algorithms.base import BuiltIn

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]


class QAdamAlgorithm(BuiltIn):
    """Declares bagua_core.algorithms.QAdam, whose arguments it takes; its first is `q_adam_optimizer` here."""

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True, bits: int = 8) -> None:
        self._core = core.QAdam(q_adam_optimizer, hierarchical=hierarchical, bits=bits)
