"""The clusters and workloads of the study, with the source or the reason of each number.

Two sources are published measurements of the original Bagua (arXiv 2107.01499, on 16 nodes of 8 V100): the time of a
computation without communication, from its asynchronous algorithm, and the rate that a node reaches over TCP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.scaling import models
from benchmarks.scaling.hardware import GBIT, Cluster, Costs, Network, Spread, Transport
from benchmarks.scaling.steps.step import Workload

# A node over TCP: near the mean of the rates that explain three published steps (published.py, tcp_rates).
TCP_BYTES_PER_S = 3.0e9
# Of a small message by NCCL or Gloo over TCP between two nodes of one data centre, and inside a node: assumed.
BETWEEN_NODES_S = 30e-6
INSIDE_NODE_S = 10e-6
_MEMORY_SHARE = 0.7  # of a GPU's memory bandwidth that simple kernels reach: assumed
_CODEC_BYTES = 9  # read twice for the range and the codes, written once


@dataclass(frozen=True, slots=True)
class Device:
    """memory_bytes_per_s, inner_bytes_per_s: the vendor's memory bandwidth; what a node's collectives reach inside."""

    name: str
    memory_bytes_per_s: float
    inner_bytes_per_s: float

    def costs(self, transport_s_per_byte: float) -> Costs:
        moved = self.memory_bytes_per_s * _MEMORY_SHARE
        return Costs(
            wire_share=0.95,
            transport_s_per_byte=transport_s_per_byte,
            memory_s_per_byte=2 / moved,
            codec_s_per_value=_CODEC_BYTES / moved,
            collective_s=20e-6,
            message_s=2e-6,
            step_s=1e-3,
        )


V100 = Device("V100", 0.9e12, 130e9)
H100 = Device("H100", 3.35e12, 300e9)


@dataclass(frozen=True, slots=True)
class Link:
    """A network of the study. tcp: its rate is limited by what processors push through TCP."""

    name: str
    gbit: float
    tcp: bool = True


LINKS = (
    Link("10 Gbit/s", 10),
    Link("25 Gbit/s", 25),
    Link("100 Gbit/s", 100),
    Link("100 Gbit/s RDMA", 100, False),
)
NODES = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the study. batch: samples of a worker and step. state_bytes: parameters and the optimizer's tensors,
    of the whole model, as a joiner copies them. sharded: the workers of a node hold one copy together, and what they
    exchange inside the node is part of the computation."""

    load: Workload
    device: Device
    batch: int
    state_bytes: float
    sharded: bool = False

    @property
    def name(self) -> str:
        return self.load.model.name

    def cluster(self, nodes: int, link: Link, spread: Spread | None = None) -> Cluster:
        network = Network(link.gbit * GBIT, BETWEEN_NODES_S if link.tcp else 10e-6, jitter_s=20e-6)
        return Cluster(
            nodes,
            network,
            self.device.costs(1 / TCP_BYTES_PER_S if link.tcp else 0.0),
            Transport.NCCL,
            workers_per_node=8,
            # the stages inside a node are torch's, and counted with the computation
            inner_bytes_per_s=1e15 if self.sharded else self.device.inner_bytes_per_s,
            vote_latency_s=BETWEEN_NODES_S,
            inner_vote_latency_s=INSIDE_NODE_S,
            shares_device=True,
            spread=Spread(sigma=0.02) if spread is None else spread,
        )


def _case(model: models.Model, compute_s: float, batch: int, device: Device, copies: int) -> Case:
    return Case(Workload(model, compute_s), device, batch, float(copies * model.parameters * 4))


def vgg16() -> Case:
    """0.142 s for 32 images a V100: 28.9k images a second of 128, of the asynchronous algorithm. SGD with momentum."""
    return _case(models.vgg16(), 4096 / 28_900, 32, V100, copies=2)


def bert_large() -> Case:
    """An epoch of 115 steps of 0.52 s: the asynchronous algorithm's 60 s. 115 steps of a global batch of 768 make the
    88,000 samples of SQuAD, and explain DDP's 2,580 s at 1 Gbit/s. The batch is inferred. Adam."""
    return _case(models.bert_large(), 60 / BERT_STEPS, 6, V100, copies=3)


BERT_STEPS = 115


def lstm_alexnet() -> Case:
    """Its shapes and its 0.2 s for 32 samples are ours: a model with large tensors and little work. Adam."""
    return _case(models.lstm_alexnet(), 0.2, 32, V100, copies=3)


def llama_7b() -> Case:
    """8,192 tokens a GPU and step, 6 operations a parameter and token, at 400 TFLOP/s: 40 % of an H100's. Adam's state
    is in fp32, beside fp32 weights. Buckets of the 8 shards of a node are simulated as one."""
    model = models.llama_7b()
    compute_s = 6 * model.parameters * 8192 / 400e12
    load = Workload(model, compute_s, bucket_cap_bytes=8 * 25 * 2**20, first_bucket_bytes=8 * 2**20)
    return Case(load, H100, 2, 12.0 * model.parameters, sharded=True)


CASES = (vgg16(), bert_large(), lstm_alexnet(), llama_7b())


def seeds_cluster(case: Case, gbit: float, latency_s: float | None = None) -> Cluster:
    """16 nodes of 8 V100, as in the published measurements. Differences of workers are in the published computation."""
    cluster = case.cluster(16, Link("", gbit), Spread())
    if latency_s is None:
        return cluster
    # what the experiment added, it added to the network; a vote is part of Bagua's step alone
    network = replace(cluster.network, latency_s=cluster.network.latency_s + latency_s)
    return replace(cluster, network=network, vote_latency_s=cluster.vote_latency_s + latency_s)
