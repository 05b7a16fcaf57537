"""Provides gradients in eight bits. The implementation through hooks is here too, for scripts that build on it."""

from __future__ import annotations

from bagua_core import algorithms as core
from bagua_core.torch_api.algorithms.base import AlgorithmImpl, BuiltIn, ScriptModel
from bagua_core.torch_api.bucket import MIN_MAX_UINT8, BaguaBucket
from bagua_core.torch_api.process_group import BaguaProcessGroup

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """The implementation of ByteGradAlgorithm through hooks, to derive from. It appends one compressed operation to
    each bucket.

    process_group: the group of all workers. hierarchical, average: as in ByteGradAlgorithm.
    """

    def __init__(
        self, process_group: BaguaProcessGroup, hierarchical: bool = True, average: bool = True
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average

    def init_operations(self, bagua_ddp: ScriptModel, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average,
            scattergather=True,
            compression=MIN_MAX_UINT8,
        )


class ByteGradAlgorithm(BuiltIn):
    """Declares bagua_core.algorithms.ByteGrad, whose arguments it takes."""

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average
        self._core = core.ByteGrad(hierarchical=hierarchical, average=average)

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        return ByteGradAlgorithmImpl(process_group, self.hierarchical, self.average)
