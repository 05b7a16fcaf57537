"""Algorithms by which workers combine their gradients or weights: one module each, looked up here by name."""

from __future__ import annotations

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.async_model_average import AsyncModelAverage
from bagua_core.algorithms.bytegrad import ByteGrad
from bagua_core.algorithms.compressed_allreduce import CompressedAllreduce
from bagua_core.algorithms.decentralized import Decentralized
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce
from bagua_core.algorithms.hook import Hook
from bagua_core.algorithms.local_sgd import LocalSGD
from bagua_core.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua_core.algorithms.qadam import QAdam
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.algorithms.streaming_diloco import StreamingDiLoCo
from bagua_core.communication.compressed.compressor import Compressor
from bagua_core.communication.compressed.compressor import register as register_compressor
from bagua_core.errors import UserError

_BY_NAME: dict[str, type[Algorithm]] = {
    AsyncModelAverage.name: AsyncModelAverage,
    ByteGrad.name: ByteGrad,
    Decentralized.name: Decentralized,
    GradientAllreduce.name: GradientAllreduce,
    QAdam.name: QAdam,
    LocalSGD.name: LocalSGD,
    LowPrecisionDecentralized.name: LowPrecisionDecentralized,
    StreamingDiLoCo.name: StreamingDiLoCo,
}


class UnknownAlgorithmError(UserError, ValueError):
    """Raised if no algorithm has the given name, or if a class was passed instead of an object."""


def algorithm_names() -> tuple[str, ...]:
    """Returns the names that `algorithm=` takes, in alphabetical order."""
    return tuple(sorted(_BY_NAME))


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """Returns the algorithm of this name with its defaults, or the given object. Raises UnknownAlgorithmError."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        raise UnknownAlgorithmError(
            f"algorithm={algorithm.__name__} is a class; pass an object, {algorithm.__name__}(...), or its name"
        )
    if not isinstance(algorithm, str) or algorithm not in _BY_NAME:
        raise UnknownAlgorithmError(
            f"algorithm={algorithm!r} is unknown; use one of {', '.join(algorithm_names())}"
        )
    return _BY_NAME[algorithm]()


__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "Attachment",
    "ByteGrad",
    "CompressedAllreduce",
    "Compressor",
    "Decentralized",
    "GradientAllreduce",
    "Hook",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "QAdam",
    "QAdamOptimizer",
    "StreamingDiLoCo",
    "UnknownAlgorithmError",
    "algorithm_names",
    "find_algorithm",
    "register_compressor",
]
