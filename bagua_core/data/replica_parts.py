"""Divides the samples of a replica among its workers, which hold one sharded model together.

torch's fully_shard averages the gradients of the workers on its mesh, each of which has trained on samples of its own.
Parts that differ in size would count alike there, so each worker's gradients are scaled by its part (`weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua_core.communication.step_interface import StepEngine
from bagua_core.data.partition import share


class ReplicaParts:
    """Divides a replica's samples among its workers as `divide` says. Raises TypeError, ValueError.

    divide: True: each worker of a replica gets samples of its own. False: all get the same, for a model whose
    workers compute one forward together (tensor parallelism). A one-dimensional mesh of the replica's: its coordinates
    get samples of their own, and the workers with one coordinate the same.
    """

    def __init__(self, divide: Any) -> None:
        self.place = (0, 1)
        """Of this worker among those that get samples of their own, and their number. Known once it has joined."""
        self._all_divide = divide is True
        if isinstance(divide, bool):
            return
        if not callable(getattr(divide, "get_local_rank", None)):
            raise TypeError(
                f"divide_in_replica={divide!r} is neither True nor False nor a DeviceMesh; give a dimension of the "
                'replica\'s mesh, as mesh["data"]'
            )
        if divide.ndim != 1:
            raise ValueError(
                f"divide_in_replica is a mesh of {divide.ndim} dimensions; give the one over which samples are divided"
            )
        self.place = (divide.get_local_rank(), divide.size())

    def join(self, engine: StepEngine) -> None:
        # Or asking for a place would join a job without replicas
        if self._all_divide and engine.replica_size > 1:
            self.place = engine.shard_place()

    def of(self, indices: Sequence[int]) -> list[int]:
        """Returns this worker's part of its replica's samples; parts differ by at most one sample."""
        place, places = self.place
        if places == 1:
            return list(indices)
        own = share(len(indices), places, place)
        return list(indices[own.start : own.stop])

    def weights(self, count: int) -> tuple[float, float]:
        """Returns MicroBatch.part and MicroBatch.own of this worker if its replica has `count` samples."""
        place, places = self.place
        if places == 1 or not count:
            return 1.0, 1.0
        own = len(share(count, places, place))
        return own * places / count, own / count
