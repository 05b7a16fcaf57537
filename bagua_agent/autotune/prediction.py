"""Predicts the time of a step under an algorithm from measured bandwidth, latency and computation. Pure.

Costs of collectives are those of bagua_contract/collective_costs.py, as those of the simulator of
benchmarks/scaling.
Assumptions: every node has one interface of equal speed; gradients are ready in proportion to
their bytes; buckets are as they were measured; what is inside a node costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_contract.collective_costs import (
    OF_QADAM,
    Cost,
    allgather,
    alltoall,
    compressed_bytes,
    ring_allreduce,
)

FORWARD_SHARE = 1 / 3  # of computation; backward has the gradients of weights and of activations
CODEC_S_PER_VALUE = 3e-10  # one compression or decompression on a processor: docs/kernels.md
MEMORY_S_PER_BYTE = 2e-10  # one pass on a processor; the calibration of docs/scaling.md fits 2.4e-10
LEAST_TIMED_S = 1e-5


@dataclass(frozen=True, slots=True)
class Link:
    """A worker's way to its neighbour in a ring through all workers. latency_s: of one message."""

    bytes_per_s: float
    latency_s: float


def link_of(buckets: Sequence[tuple[int, float]], workers: int) -> Link | None:
    """Returns the link that explains the times of plain sums in rings of so many workers: least squares of the relative
    errors. None: nothing was measured, or nothing is sent."""
    timed = [(size, max(seconds, LEAST_TIMED_S)) for size, seconds in buckets if size > 0]
    if workers < 2 or not timed:
        return None
    points = []
    for size, seconds in timed:
        cost = ring_allreduce(workers, size)
        points.append((cost.sent_bytes / seconds, cost.rounds / seconds))
    bb = sum(b * b for b, _ in points)
    br = sum(b * r for b, r in points)
    rr = sum(r * r for _, r in points)
    b1, r1 = sum(b for b, _ in points), sum(r for _, r in points)
    determinant = bb * rr - br * br
    if determinant > 1e-9 * bb * rr:
        byte_s, latency_s = (b1 * rr - r1 * br) / determinant, (r1 * bb - b1 * br) / determinant
        if byte_s > 0 and latency_s >= 0:
            return Link(1.0 / byte_s, latency_s)
    # sizes that hardly differ tell the sum of both, and a latency below 0 is noise
    return Link(bb / b1, 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one step. compute_s: of a step without waits for others. buckets: bytes, in the order of launch.
    nodes, workers: of the world."""

    compute_s: float
    buckets: tuple[int, ...]
    nodes: int
    workers: int


def step_s(algorithm: str, load: Load, link: Link) -> float:
    """Returns the predicted time of a step. Raises ValueError for an algorithm that it does not know."""
    if algorithm not in ("gradient_allreduce", "bytegrad", "qadam"):
        raise ValueError(f"nothing is known of the cost of {algorithm!r}")
    forward_s, whole, so_far, ready_s = load.compute_s * FORWARD_SHARE, sum(load.buckets), 0, []
    for size in load.buckets:
        so_far += size
        ready_s.append(forward_s + (load.compute_s - forward_s) * so_far / whole)
    network = _Network(link)
    if algorithm == "gradient_allreduce" or load.nodes < 2:
        return max(load.compute_s, _sums(load, ready_s, network))
    pass_s = MEMORY_S_PER_BYTE * 4 if algorithm == "qadam" else 0.0
    exchanged_s = max(load.compute_s, _compressed_sums(load, ready_s, network, pass_s))
    return exchanged_s + pass_s * OF_QADAM.optimizer * (whole // 4)


class _Network:
    """The network of a prediction. Operations take turns in the order of their start; the latency of one does not delay
    the next."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_s = 0.0

    def carry(self, at_s: float, cost: Cost) -> float:
        """Returns the moment at which the operation is complete."""
        self._free_s = max(at_s, self._free_s) + cost.sent_bytes / self._link.bytes_per_s
        return self._free_s + cost.rounds * self._link.latency_s


def _sums(load: Load, ready_s: Sequence[float], network: _Network) -> float:
    buckets = zip(load.buckets, ready_s, strict=True)
    return max(
        (network.carry(at_s, ring_allreduce(load.workers, size)) for size, at_s in buckets), default=0.0
    )


class _Job:
    """The sum of one bucket in compressed form, with the waits of compressed_sum.py. awaited_s: the end of its last.
    pass_s: of the processor for a value in each of qadam's passes; 0 for bytegrad, which has none."""

    def __init__(self, values: int, nodes: int, pass_s: float) -> None:
        chunk = -(-values // nodes)
        message = compressed_bytes(chunk)
        codec_s = CODEC_S_PER_VALUE
        self.awaited_s = 0.0
        # processor before the operation, and the operation
        self._waits: list[tuple[float, Cost | None]] = [
            (0.0, None),  # within the node
            (values * (OF_QADAM.before * pass_s + codec_s), alltoall(nodes, message)),
            ((values + chunk) * codec_s, allgather(nodes, message)),
            (0.0, None),
            (values * (codec_s + OF_QADAM.behind * pass_s), None),
        ]

    @property
    def is_over(self) -> bool:
        return not self._waits

    def advance(self, at_s: float, network: _Network) -> float:
        """Performs the next wait and returns the moment at which the thread of the operation queue goes on."""
        at_s = max(at_s, self.awaited_s)
        work_s, cost = self._waits.pop(0)
        at_s += work_s
        self.awaited_s = at_s if cost is None else network.carry(at_s, cost)
        return at_s


def _compressed_sums(load: Load, ready_s: Sequence[float], network: _Network, pass_s: float) -> float:
    """Returns the moment at which the last compressed sum is complete. In the order of the operation queue, a bucket
    that begins moves each earlier one on by one wait."""
    at_s, open_jobs = 0.0, list[_Job]()
    for size, ready in zip(load.buckets, ready_s, strict=True):
        begun = _Job(size // 4, load.nodes, pass_s)
        at_s = begun.advance(max(at_s, ready), network)
        for job in open_jobs:
            at_s = job.advance(at_s, network)
        open_jobs = [job for job in (*open_jobs, begun) if not job.is_over]
    at_s = max([at_s, *ready_s])
    while open_jobs:
        for job in open_jobs:
            at_s = job.advance(at_s, network)
        open_jobs = [job for job in open_jobs if not job.is_over]
    return at_s
