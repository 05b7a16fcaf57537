"""Keeps the simulated time of every node at once: clocks of threads, and links that carry collective operations.

Operations of a job have one order on all workers that never depends on time: the runtime guarantees it, since
transports match collectives by their order. So the simulator takes events in that order instead of a queue sorted by
time, and each event is a vector with one time for each node. Within that order the result is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bagua_contract import collective_costs
from bagua_contract.collective_costs import Cost
from benchmarks.scaling.hardware import Cluster, Transport, longer

Times = npt.NDArray[np.float64]
"""[nodes], seconds."""


class Clock:
    """A thread or a stream of every node."""

    def __init__(self, nodes: int) -> None:
        self.at: Times = np.zeros(nodes)

    def wait(self, until: Times) -> None:
        self.at = np.maximum(self.at, until)

    def work(self, seconds: float | Times) -> None:
        self.at = self.at + seconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """One operation as a node sees it. sent_bytes: over its interface. rounds: messages that wait for one another.
    messages: that a node sends to further peers, each of which costs Costs.message_s. peers: [k, nodes], the nodes that
    each one waits for; None: all wait for all."""

    sent_bytes: float
    rounds: int
    messages: int = 0
    peers: npt.NDArray[np.int64] | None = None


def _traffic(cost: Cost) -> Traffic:
    return Traffic(cost.sent_bytes, cost.rounds, cost.messages)


class Link:
    """The interfaces of all nodes. Counts what a node sent, for checks."""

    def __init__(self, cluster: Cluster, random: np.random.Generator) -> None:
        self._cluster = cluster
        self._random = random
        self.free: Times = np.zeros(cluster.nodes)
        # bytes that may leave at once, at the moment when this was last counted
        self._burst = self._full_burst = cluster.network.burst_bytes * cluster.costs.wire_share
        self._burst_at = 0.0
        self.sent_bytes = 0.0
        self.busy_s = 0.0

    def start(self, ready: Times, traffic: Traffic) -> Times:
        """The moments at which the operation is complete. ready: at which each node starts its part.

        Operations take turns on the interface in the order of the calls. NCCL's also wait for the latency of the one
        before: it runs them in one stream. Gloo's do not.
        """
        cluster = self._cluster
        begun = np.maximum(ready, self.free)
        if cluster.network.jitter_s:
            begun = begun + self._random.exponential(cluster.network.jitter_s, cluster.nodes)
        if traffic.peers is None:
            together = np.full_like(begun, begun.max())
        else:
            together = np.maximum(begun, begun[traffic.peers].max(axis=0))
        busy = self._send_s(float(together.max()), traffic.sent_bytes)
        busy += traffic.messages * cluster.costs.message_s
        done = together + busy + traffic.rounds * cluster.network.latency_s
        self.free = done if cluster.transport is Transport.NCCL else together + busy
        self.sent_bytes += traffic.sent_bytes
        self.busy_s += busy
        return done

    def _send_s(self, at_s: float, sent_bytes: float) -> float:
        """Takes what may leave at once from the burst, which grows again at the link's bandwidth. The interfaces of a
        collective carry the same at the same time, so one burst is counted for all of them."""
        cluster = self._cluster
        if not self._full_burst or not sent_bytes:
            return sent_bytes * cluster.byte_s
        rate = cluster.wire_bytes_per_s
        burst = min(self._full_burst, self._burst + max(0.0, at_s - self._burst_at) * rate)
        wire_s = max(0.0, sent_bytes - burst) / rate
        took_s = longer(wire_s, sent_bytes * cluster.costs.transport_s_per_byte)
        self._burst = min(self._full_burst, max(0.0, burst + took_s * rate - sent_bytes))
        self._burst_at = at_s + took_s
        return took_s

    def allreduce(self, ready: Times, size_bytes: float) -> Times:
        return self.start(ready, self.allreduce_traffic(size_bytes))

    def allreduce_traffic(self, size_bytes: float) -> Traffic:
        """A ring; with NCCL a tree where that is expected to be faster: it sends twice the data in few rounds."""
        nodes = self._cluster.nodes
        if nodes == 1:
            return Traffic(0.0, 0)
        ring = _traffic(collective_costs.ring_allreduce(nodes, size_bytes))
        tree = Traffic(2 * size_bytes, 2 * math.ceil(math.log2(nodes)))
        if self._cluster.transport is Transport.GLOO:
            return ring
        return min(ring, tree, key=self._seconds)

    def alltoall(self, ready: Times, size_bytes: float) -> Times:
        """size_bytes: for each peer."""
        return self.start(ready, _traffic(collective_costs.alltoall(self._cluster.nodes, size_bytes)))

    def allgather(self, ready: Times, size_bytes: float) -> Times:
        """size_bytes: of each node's part. A ring."""
        return self.start(ready, _traffic(collective_costs.allgather(self._cluster.nodes, size_bytes)))

    def swap(self, ready: Times, size_bytes: float, peers: npt.NDArray[np.int64]) -> Times:
        """peers: [k, nodes], to each of which a node sends so much and from which it receives as much."""
        return self.start(ready, Traffic(len(peers) * size_bytes, 1, messages=len(peers) - 1, peers=peers))

    def _seconds(self, traffic: Traffic) -> float:
        return traffic.sent_bytes * self._cluster.byte_s + traffic.rounds * self._cluster.expected_latency_s


def within_node_s(cluster: Cluster, size_bytes: float, passes: float) -> float:
    """For `passes` times the tensor through the links inside a node; nothing with one worker a node."""
    workers = cluster.workers_per_node
    if workers == 1:
        return 0.0
    return (
        passes * size_bytes * (workers - 1) / workers / cluster.inner_bytes_per_s + cluster.costs.collective_s
    )


def vote_s(cluster: Cluster) -> float:
    """The allreduce of a few numbers by Gloo over all workers: a ring of workers in the order of nodes."""
    if cluster.workers == 1:
        return 0.0
    between = cluster.nodes if cluster.nodes > 1 else 0
    inside = cluster.workers - between
    passes = 2 * (cluster.workers - 1) / cluster.workers
    return passes * (between * cluster.vote_latency_s + inside * cluster.inner_vote_latency_s)
