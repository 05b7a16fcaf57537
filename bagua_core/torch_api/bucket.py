"""Defines the bucket of gradients to which algorithms of a script append operations, which run in order.

Owns the bucket as such a script sees it, and what each operation does. They run in the script's thread when the
backward is through, the same on all workers. Before the first one the bucket holds the mean gradient of this worker's
own samples; after the last, what the optimizers are to see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.compressed.compressed_sum import CompressedSum
from bagua_core.communication.compressed.compression import MinMax
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation, Sum
from bagua_core.communication.reduction.operation_queue import OperationQueue
from bagua_core.communication.topology.hierarchical_sum import HierarchicalSum
from bagua_core.torch_api.errors import UnsupportedAlgorithmError

__all__ = ["BaguaBucket"]

MIN_MAX_UINT8 = "MinMaxUInt8"


@dataclass(frozen=True, slots=True)
class Turn:
    """The input of an operation. weight: this worker's share of the step's samples. communicator: None if alone."""

    bucket: Bucket
    number: int
    communicator: Communicator | None
    weight: float
    wait: Callable[[Pending], None]


class Operation(ABC):
    @abstractmethod
    def run(self, turn: Turn) -> None:
        """Acts on the gradients in the bucket. Raises CollectiveFailed."""

    def reduced(self) -> None:  # noqa: B027 (most remember nothing)
        """Takes over what the step changed; called when it is final."""

    def failed(self) -> None:  # noqa: B027
        """Drops what the step changed; called when it did not happen."""


class PythonOp(Operation):
    def __init__(self, function: Callable[[str], Any], name: str) -> None:
        self._function = function
        self._name = name

    def run(self, turn: Turn) -> None:
        self._function(self._name)


class CentralizedOp(Operation):
    """Replaces the gradients by their sum over all workers, or by their mean weighted by samples."""

    def __init__(self, summing: BucketOperation, average: bool) -> None:
        self._summing = summing
        self._average = average

    def run(self, turn: Turn) -> None:
        if turn.communicator is None:
            return
        if self._average:
            turn.bucket.flat.mul_(turn.weight)
        turn.wait(self._summing.launch(turn.communicator, turn.bucket, turn.number, turn.weight))

    def reduced(self) -> None:
        self._summing.reduced()

    def failed(self) -> None:
        self._summing.failed()


class BaguaBucket:
    """A bucket of gradients, with the operations that a script has appended to it.

    name: unique in the model. tensors: the parameters, whose .grad lies in the bucket. operation_queue: None for a
    bucket of one of the runtime's algorithms, which takes no operations.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[nn.Parameter],
        bucket: Bucket,
        operation_queue: OperationQueue | None,
    ) -> None:
        self.name = name
        self.tensors = list(tensors)
        self._bucket = bucket
        self._operations = operation_queue
        self.operations: list[Operation] = []

    def _for_operations(self) -> OperationQueue:
        """Returns the operation queue for operations. Raises UnsupportedAlgorithmError for a bucket that takes none."""
        if self._operations is None:
            raise UnsupportedAlgorithmError(
                f"bucket {self.name} belongs to one of the runtime's own algorithms, which takes no further "
                "operations; write an AlgorithmImpl with an init_operations (docs/original-scripts.md)"
            )
        return self._operations

    def flattened_tensor(self) -> torch.Tensor:
        """Returns [elements of all tensors]: the gradients themselves, not a copy. Only good within an operation."""
        return self._bucket.flat[: self._bucket.plan.elements]

    def bytes(self) -> int:
        """Returns the size of the gradients, in bytes."""
        flat = self.flattened_tensor()
        return flat.numel() * flat.element_size()

    def clear_ops(self) -> BaguaBucket:
        """Removes all operations. Returns the bucket."""
        self.operations.clear()
        return self

    def append_python_op(self, python_function: Callable[[str], Any], group: Any = None) -> BaguaBucket:
        """Appends a call of python_function(name of the bucket). Returns the bucket.

        The function may change the gradients in place and call collectives, as long as all workers call the same. A
        step that failed may be in the middle of it: then collectives return what they got. group: ignored.
        Raises UnsupportedAlgorithmError for a bucket that takes no operations.
        """
        self._for_operations()
        self.operations.append(PythonOp(python_function, self.name))
        return self

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: Any = None,
    ) -> BaguaBucket:
        """Appends the mean of the gradients over all workers, weighted by samples (average), or their sum. Returns the
        bucket.

        hierarchical: sum within each node first.
        scattergather: must be True with a compression.
        compression: None or "MinMaxUInt8".
        group: ignored.

        Raises ValueError, and UnsupportedAlgorithmError for a bucket that takes no operations.
        """
        if compression not in (None, MIN_MAX_UINT8):
            raise ValueError(f'compression={compression!r} is unknown; use "{MIN_MAX_UINT8}" or None')
        if compression and not scattergather:
            raise ValueError("compression needs scattergather=True: chunks are summed by their owners")
        operation_queue = self._for_operations()
        summing: BucketOperation = Sum()
        if compression:
            summing = CompressedSum(operation_queue, MinMax(), hierarchical)
        elif hierarchical:
            summing = HierarchicalSum(operation_queue)
        self.operations.append(CentralizedOp(summing, average))
        return self

    def append_decentralized_synchronous_op(self, *args: Any, **kwargs: Any) -> BaguaBucket:
        """Raises UnsupportedAlgorithmError: a bucket holds gradients, and this operation shares weights."""
        raise _refused("append_decentralized_synchronous_op", "decentralized.DecentralizedAlgorithm")

    def append_low_precision_decentralized_synchronous_op(self, *args: Any, **kwargs: Any) -> BaguaBucket:
        """Raises UnsupportedAlgorithmError: a bucket holds gradients, and this operation shares weights."""
        raise _refused(
            "append_low_precision_decentralized_synchronous_op",
            "decentralized.LowPrecisionDecentralizedAlgorithm",
        )

    def append_asynchronous_model_average_op(self, *args: Any, **kwargs: Any) -> BaguaBucket:
        """Raises UnsupportedAlgorithmError: a bucket holds gradients, and this operation shares weights."""
        raise _refused(
            "append_asynchronous_model_average_op", "async_model_average.AsyncModelAverageAlgorithm"
        )


def _refused(what: str, instead: str) -> UnsupportedAlgorithmError:
    return UnsupportedAlgorithmError(
        f"{what}: weights are shared there, and a bucket of an own algorithm holds gradients; use "
        f"algorithms.{instead}, or write one for the core (docs/algorithms.md)"
    )
