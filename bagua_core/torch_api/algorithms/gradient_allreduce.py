"""Provides plain data parallelism. The implementation through hooks is here too, for scripts that build on it."""

from __future__ import annotations

from bagua_core import algorithms as core
from bagua_core.torch_api.algorithms.base import AlgorithmImpl, BuiltIn, ScriptModel
from bagua_core.torch_api.bucket import BaguaBucket
from bagua_core.torch_api.process_group import BaguaProcessGroup

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """The implementation of GradientAllReduceAlgorithm through hooks, to derive from. It appends one operation to each
    bucket.

    process_group: the group of all workers. hierarchical, average: as in GradientAllReduceAlgorithm.
    """

    def __init__(
        self, process_group: BaguaProcessGroup, hierarchical: bool = False, average: bool = True
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average

    def init_operations(self, bagua_ddp: ScriptModel, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(hierarchical=self.hierarchical, average=self.average)


class GradientAllReduceAlgorithm(BuiltIn):
    """Declares bagua_core.algorithms.GradientAllreduce, whose arguments it takes."""

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average
        self._core = core.GradientAllreduce(hierarchical=hierarchical, average=average)

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        return GradientAllReduceAlgorithmImpl(process_group, self.hierarchical, self.average)
