"""Describes a simulated cluster: links, the cost of communication on processors, and how workers differ.

Pure data. Times are seconds, sizes bytes. A node has one interface to the network, which its workers share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

GBIT = 1e9 / 8  # bytes per second
_SHARPNESS = 4  # of two equal times 1.19 of one counts


class Transport(Enum):
    """GLOO reduces in rings. NCCL takes a ring or a tree, whichever is faster, and runs one operation at a time."""

    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Network:
    """bandwidth: of a node's interface, in each direction. latency_s: of one small message between two nodes, one way,
    with the software at both ends. jitter_s: mean of an exponential delay that each node adds to each operation.
    burst_bytes: that an interface sends beyond its bandwidth after it was idle, as a token bucket lets pass."""

    bandwidth_bytes_per_s: float
    latency_s: float
    jitter_s: float = 0.0
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s <= 0 or min(self.latency_s, self.jitter_s, self.burst_bytes) < 0:
            raise ValueError(
                f"{self}: the bandwidth must be positive, latency, jitter and burst not negative"
            )


def sharing(hosts: int, cores: int, exponent: float) -> float:
    """By how much work takes longer on each of `hosts` hosts that share `cores` processors."""
    return float(max(1.0, hosts / cores) ** exponent)


@dataclass(frozen=True, slots=True)
class Costs:
    """What communication costs a node's processors.

    wire_share: of the link's bandwidth that carries data, without the headers of TCP, IP and Ethernet.
    transport_s_per_byte: to send one byte and receive one; the transport is never faster.
    memory_s_per_byte: to copy or add. codec_s_per_value: to compress or decompress one value.
    collective_s: to start an operation. message_s: for each further peer of an all-to-all.
    step_s: once a step, beside the computation: the boundary, the loader, the optimizer's calls. step_s_per_byte:
    of the gradients, likewise: autograd adds each to its bucket, and the optimizer reads it.
    """

    wire_share: float = 0.95
    transport_s_per_byte: float = 0.0
    memory_s_per_byte: float = 0.0
    codec_s_per_value: float = 0.0
    collective_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    step_s_per_byte: float = 0.0

    def shared_by(self, hosts: int, cores: int, exponent: float = 1.0) -> Costs:
        """Of `hosts` lab hosts that run on `cores` processors at the same time. exponent: of their ratio; 1 if all
        hosts always work at once, 0 if they never do."""
        factor = sharing(hosts, cores, exponent)
        return replace(
            self,
            transport_s_per_byte=self.transport_s_per_byte * factor,
            memory_s_per_byte=self.memory_s_per_byte * factor,
            codec_s_per_value=self.codec_s_per_value * factor,
            collective_s=self.collective_s * factor,
            message_s=self.message_s * factor,
            step_s=self.step_s * factor,
            step_s_per_byte=self.step_s_per_byte * factor,
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """How the time of a computation differs. sigma: standard deviation of its logarithm, drawn anew for each worker and
    step. slow_nodes: so many nodes take slow_factor times as long in every step."""

    sigma: float = 0.0
    slow_nodes: int = 0
    slow_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """nodes of workers_per_node workers each. inner_bytes_per_s: between the workers of a node. vote_latency_s: of one
    message of the vote of a step, which travels by Gloo over all workers. shares_device: compression runs on the device
    that computes, so it delays the computation; else on an idle processor. expected_latency_s: by which NCCL chooses
    between ring and tree; it does not measure the network's."""

    nodes: int
    network: Network
    costs: Costs
    transport: Transport = Transport.GLOO
    workers_per_node: int = 1
    inner_bytes_per_s: float = 100e9
    vote_latency_s: float = 0.0
    inner_vote_latency_s: float = 0.0
    shares_device: bool = False
    expected_latency_s: float = 30e-6
    spread: Spread = Spread()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.workers_per_node < 1:
            raise ValueError(f"{self.nodes} nodes of {self.workers_per_node} workers; both must be positive")

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def wire_bytes_per_s(self) -> float:
        """The data that a link carries."""
        return self.network.bandwidth_bytes_per_s * self.costs.wire_share

    @property
    def byte_s(self) -> float:
        """For one byte that a node sends: the wire's time or the processors', whichever is longer, and a little more
        where both are about equal, for they do not overlap perfectly."""
        return longer(1.0 / self.wire_bytes_per_s, self.costs.transport_s_per_byte)


def longer(one_s: float, other_s: float) -> float:
    """The longer of two times, and a little more where both are about equal."""
    return float((one_s**_SHARPNESS + other_s**_SHARPNESS) ** (1 / _SHARPNESS))
