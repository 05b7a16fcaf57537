"""Exchanges beside the steps: asynchronous averaging, and the fragments of Streaming DiLoCo.

Both send in pieces, so a step's vote waits for one piece at most.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bagua_core.communication.compressed.minmax_int4 import MinMaxInt4
from bagua_core.communication.reduction.buckets import BucketPlan
from bagua_core.communication.weights.background_average import PIECE_BYTES
from bagua_core.communication.weights.fragment_schedule import Action, Schedule, cut
from benchmarks.scaling.hardware import Cluster
from benchmarks.scaling.steps.exchanges import Exchange
from benchmarks.scaling.steps.timeline import vote_s
from benchmarks.scaling.steps.workers import Workers


def round_s(cluster: Cluster, size_bytes: float) -> float:
    """For the mean of a model over all workers in the background: pieces, one after the other, by Gloo, whose ring
    visits every worker (background_average.py), from the memory of the host."""
    if cluster.workers == 1:
        return 0.0
    pieces = -(-size_bytes // PIECE_BYTES)
    sent = 2 * (cluster.workers - 1) / cluster.workers * size_bytes
    # of the ring's edges one a node crosses its interface, so an interface carries what one worker sends
    return pieces * (vote_s(cluster) + cluster.costs.collective_s) + sent * cluster.byte_s


class AsyncAverage(Exchange):
    """A round begins interval_s after the one before began, or when that has ended."""

    def __init__(self, workers: Workers, buckets: tuple[BucketPlan, ...], interval_s: float) -> None:
        super().__init__(workers, buckets)
        self._interval_s = interval_s
        self._took_s = round_s(workers.cluster, self._all_bytes)
        self._began = np.full(workers.cluster.nodes, -np.inf)
        self._end: npt.NDArray[np.float64] | None = None
        self.rounds = 0

    def forward_begins(self, step: int) -> None:
        workers, script = self._workers, self._workers.script
        now = float(script.at.max())
        copy_s = workers.costs.memory_s_per_byte * self._all_bytes
        if self._end is not None and now >= float(self._end.max()):
            self._end = None
            self.rounds += 1
            workers.device_work(script, 3 * copy_s)
        if self._end is None and now - float(self._began.max()) >= self._interval_s:
            workers.device_work(script, 2 * copy_s)
            self._began = script.at
            self._end = np.full_like(script.at, script.at.max() + self._took_s)

    def backward_ends(self) -> None:
        """The vote may find a piece on the link: half of one on average."""
        if self._end is not None and float(self._end.max()) > float(self._workers.script.at.max()):
            self._workers.script.work(PIECE_BYTES * self._workers.cluster.byte_s / 2)


class StreamingDiLoCo(Exchange):
    """Fragments of the model in turn, in four bits, by the runtime's own schedule."""

    def __init__(
        self,
        workers: Workers,
        buckets: tuple[BucketPlan, ...],
        sizes: list[int],
        schedule: Schedule,
    ) -> None:
        super().__init__(workers, buckets)
        self._fragments = [sum(sizes[i] for i in part) for part in cut(sizes, schedule.count)]
        self._schedule = schedule
        self._clocks = [0] * len(self._fragments)
        self._sent: list[int | None] = [None] * len(self._fragments)
        self._ends = [np.zeros(workers.cluster.nodes) for _ in self._fragments]
        self._compressor = MinMaxInt4()

    def forward_begins(self, step: int) -> None:
        workers, script = self._workers, self._workers.script
        nodes = workers.cluster.nodes
        if nodes == 1:
            return
        for number, values in enumerate(self._fragments):
            decision = self._schedule.decide(number, step, self._clocks[number], self._sent[number])
            memory_s = 4 * workers.costs.memory_s_per_byte * values
            if decision.action is Action.SEND:
                workers.device_work(script, 2 * memory_s)
                message = self._compressor.size_bytes(-(-values // nodes))
                ready = workers.link.alltoall(script.at, message)
                self._ends[number] = workers.link.allgather(ready, message)
                self._sent[number] = step
            elif decision.action is Action.APPLY:
                script.wait(self._ends[number])
                workers.device_work(script, 4 * memory_s)
                sent = self._sent[number]
                assert sent is not None
                self._clocks[number], self._sent[number] = sent, None
