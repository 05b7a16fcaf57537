"""What each algorithm sends and computes in a step, as bagua_core/algorithms does it.

Sizes, chunks, peers and limits come from the runtime's own pure code. An exchange acts on the moments of a step: the
first forward, a full bucket, the end of backward. QAdam is simulated after its warm-up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bagua_contract.collective_costs import NO_PASSES, OF_QADAM, Passes
from bagua_core.communication.compressed.chunks import Chunks
from bagua_core.communication.compressed.compressed_sum import _TAIL_BYTES as TAIL_BYTES
from bagua_core.communication.compressed.compressed_sum import is_compressed
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.buckets import BucketPlan
from bagua_core.communication.topology.peer_selection import peer_of, ring_neighbours, shift_one
from bagua_core.communication.topology.routes import Route
from bagua_core.kernels.formats import minmax_bytes, one_bit_bytes
from benchmarks.scaling.steps.order import Arrival, Job, SimulatedQueue
from benchmarks.scaling.steps.timeline import within_node_s
from benchmarks.scaling.steps.workers import Workers

_FP32_BYTES = 4


class Exchange:
    """carries_vote: the step's vote travels in a bucket, where one of a processor can carry it. votes_at_once: if not,
    it starts as backward ends, beside the buckets that still travel (BucketOperation.starts_at_once)."""

    carries_vote = False
    votes_at_once = False

    def __init__(self, workers: Workers, buckets: tuple[BucketPlan, ...]) -> None:
        self._workers = workers
        self._buckets = buckets

    def forward_begins(self, step: int) -> None:
        """The script's threads are at the step's first forward."""

    def launch(self, number: int) -> None:
        """Bucket `number` is full on all workers, at the script's time."""

    def backward_ends(self) -> None:
        """Let the script's threads wait for what the step needs."""

    # -- for subclasses

    @property
    def _all_bytes(self) -> float:
        return float(sum(plan.elements * plan.dtype.itemsize for plan in self._buckets))

    @property
    def _all_values(self) -> int:
        return sum(plan.elements for plan in self._buckets)


class Allreduce(Exchange):
    """The sum of every bucket, started at once. DDP does the same.

    share: of a bucket's bytes that travel. It is 0.5 for torch's hook that sends gradients in 16 bits; its two
    conversions cost nothing here.
    """

    carries_vote = True
    votes_at_once = True

    def __init__(self, workers: Workers, buckets: tuple[BucketPlan, ...], share: float = 1.0) -> None:
        super().__init__(workers, buckets)
        self._share = share
        self._ends: list[npt.NDArray[np.float64]] = []

    def launch(self, number: int) -> None:
        workers, plan = self._workers, self._buckets[number]
        workers.script.work(workers.costs.collective_s)
        size_bytes = plan.elements * plan.dtype.itemsize * self._share
        # within the node the ring's other edges carry the same at the same time; the slower of both counts
        inside_s = within_node_s(workers.cluster, size_bytes, 2)
        ready = workers.script.at
        self._ends.append(np.maximum(workers.link.allreduce(ready, size_bytes), ready + inside_s))

    def backward_ends(self) -> None:
        for end in self._ends:
            self._workers.script.wait(end)
        self._ends = []


class CompressedSum(Exchange):
    """ByteGrad and QAdam: reduce in the node, all-to-all of compressed chunks, their sums to all.

    size_bytes: of so many compressed values. passes: QAdam's over memory.
    """

    carries_vote = True

    def __init__(
        self,
        workers: Workers,
        buckets: tuple[BucketPlan, ...],
        size_bytes: Callable[[int], int],
        passes: Passes = NO_PASSES,
    ) -> None:
        super().__init__(workers, buckets)
        self._size_bytes = size_bytes
        self._passes = passes
        self._pass_s = workers.costs.memory_s_per_byte * _FP32_BYTES
        self._operations = SimulatedQueue(workers.cluster.nodes)

    def launch(self, number: int) -> None:
        script = self._workers.script
        self._operations.launch(script.at, self._sum(self._buckets[number]))

    def backward_ends(self) -> None:
        script = self._workers.script
        script.wait(self._operations.flush(script.at))
        self._workers.device_work(script, self._pass_s * self._passes.optimizer * self._all_values)

    def _sum(self, plan: BucketPlan) -> Job:
        workers, clock, link = self._workers, self._operations.clock, self._workers.link
        cluster, costs = workers.cluster, workers.costs
        # the communicators of a route are not looked at, only how many parties it has
        route = Route(None, None, cluster.nodes)
        whole_bytes = plan.elements * plan.dtype.itemsize
        clock.work(costs.collective_s)
        if not is_compressed(plan, route):
            yield Arrival(clock, link.allreduce(clock.at, whole_bytes))
            return
        yield Arrival(clock, clock.at + within_node_s(cluster, whole_bytes, 1))
        chunks = Chunks(plan.elements, cluster.nodes)
        values = chunks.size * chunks.owners
        message = self._size_bytes(chunks.size)
        workers.device_work(
            clock, costs.codec_s_per_value * values + self._pass_s * self._passes.before * plan.elements
        )
        yield Arrival(clock, link.alltoall(clock.at, message))
        workers.device_work(clock, costs.codec_s_per_value * (values + chunks.size))
        clock.work(costs.collective_s)
        yield Arrival(clock, link.allgather(clock.at, message + TAIL_BYTES))
        if cluster.workers_per_node > 1:
            yield Arrival(clock, clock.at + within_node_s(cluster, chunks.owners * message, 1))
        else:
            yield DonePending()
        workers.device_work(
            clock, costs.codec_s_per_value * values + self._pass_s * self._passes.behind * plan.elements
        )


def bytegrad(workers: Workers, buckets: tuple[BucketPlan, ...]) -> CompressedSum:
    return CompressedSum(workers, buckets, minmax_bytes)


def qadam_8bit(workers: Workers, buckets: tuple[BucketPlan, ...]) -> CompressedSum:
    return CompressedSum(workers, buckets, minmax_bytes, OF_QADAM)


def qadam_1bit(workers: Workers, buckets: tuple[BucketPlan, ...]) -> CompressedSum:
    return CompressedSum(workers, buckets, one_bit_bytes, OF_QADAM)


class Decentralized(Exchange):
    """Weights travel while forward and backward run: the mean over all, or of a pair that changes each step."""

    def __init__(self, workers: Workers, buckets: tuple[BucketPlan, ...], in_pairs: bool) -> None:
        super().__init__(workers, buckets)
        self._in_pairs = in_pairs
        self._end = np.zeros(workers.cluster.nodes)

    def forward_begins(self, step: int) -> None:
        workers, size = self._workers, self._all_bytes
        costs, cluster = workers.costs, workers.cluster
        workers.device_work(workers.script, costs.memory_s_per_byte * size)
        workers.script.work(costs.collective_s)
        ready = workers.script.at + within_node_s(cluster, size, 2)
        if cluster.nodes == 1:
            end = ready
        elif self._in_pairs:
            peers = _pairs(step, cluster.nodes)
            end = np.where(
                peers == np.arange(cluster.nodes), ready, workers.link.swap(ready, size, peers[None, :])
            )
        else:
            end = workers.link.allreduce(ready, size)
        self._end = end + within_node_s(cluster, size, 1)

    def backward_ends(self) -> None:
        workers = self._workers
        workers.script.wait(self._end)
        # the mean, and back to the weights
        workers.device_work(workers.script, 2 * workers.costs.memory_s_per_byte * self._all_bytes)


def _pairs(step: int, nodes: int) -> npt.NDArray[np.int64]:
    """Each node's peer; itself if it sits this exchange out."""
    peers = [peer_of(shift_one, step, index, nodes) for index in range(nodes)]
    return np.array([index if peer is None else peer for index, peer in enumerate(peers)])


class LowPrecisionRing(Exchange):
    """One byte a weight to both neighbours, before the step's forward; nothing overlaps it."""

    def forward_begins(self, step: int) -> None:
        workers = self._workers
        cluster, costs, script = workers.cluster, workers.costs, workers.script
        if cluster.nodes == 1:
            return
        size, values = self._all_bytes, self._all_values
        script.work(within_node_s(cluster, size, 2))
        # fill, three sums, and the image of the weights before
        workers.device_work(script, 5 * costs.memory_s_per_byte * size + costs.codec_s_per_value * values)
        script.work(costs.collective_s)
        pairs = [ring_neighbours(index, cluster.nodes) for index in range(cluster.nodes)]
        peers = np.array(pairs).T
        if cluster.nodes == 2:
            peers = peers[:1]  # the same neighbour on both sides gets one message
        script.wait(workers.link.swap(script.at, minmax_bytes(values), peers))
        workers.device_work(script, 3 * costs.codec_s_per_value * values + costs.memory_s_per_byte * size)
        script.work(within_node_s(cluster, size, 1))


class LocalSteps(Exchange):
    """Local SGD: every `every` steps all models become their mean, and nothing overlaps it."""

    def __init__(self, workers: Workers, buckets: tuple[BucketPlan, ...], every: int) -> None:
        super().__init__(workers, buckets)
        self._every = every

    def forward_begins(self, step: int) -> None:
        workers, size = self._workers, self._all_bytes
        if step % self._every or workers.cluster.nodes == 1:
            return
        script, costs = workers.script, workers.costs
        workers.device_work(script, 2 * costs.memory_s_per_byte * size)
        script.work(costs.collective_s)
        ready = script.at
        inside_s = within_node_s(workers.cluster, size, 2)
        script.wait(np.maximum(workers.link.allreduce(ready, size), ready + inside_s))
        workers.device_work(script, 3 * costs.memory_s_per_byte * size)
