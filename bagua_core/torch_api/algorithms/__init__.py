"""Provides the algorithms under the names that scripts of the original know them by, one module for each."""

from __future__ import annotations

from bagua_core.torch_api.algorithms import (
    async_model_average,
    base,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from bagua_core.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

Algorithm.register("gradient_allreduce", gradient_allreduce.GradientAllReduceAlgorithm)
Algorithm.register("bytegrad", bytegrad.ByteGradAlgorithm)
Algorithm.register("decentralized", decentralized.DecentralizedAlgorithm)
Algorithm.register("low_precision_decentralized", decentralized.LowPrecisionDecentralizedAlgorithm)
Algorithm.register("qadam", q_adam.QAdamAlgorithm)
Algorithm.register("async", async_model_average.AsyncModelAverageAlgorithm)

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "base",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]
