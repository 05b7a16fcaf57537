"""The published measurements of the original Bagua, beside the simulator's predictions for the same cluster.

Values are read off the figures of arXiv 2107.01499: 16 nodes of 8 V100, TCP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.scaling import presets
from benchmarks.scaling.hardware import Cluster
from benchmarks.scaling.steps.step import simulate

WORKERS = 128
_MS = 1e-3
_NO_LIMIT = 1e15  # bytes a second

# algorithm of the simulator -> images a second, of VGG16
VGG16 = {
    100: {
        "ddp": 8900,
        "gradient_allreduce": 12300,
        "decentralized": 13700,
        "low_precision_decentralized": 15900,
        "qadam_8bit": 18900,
        "bytegrad": 21800,
        "async": 28900,
    },
    10: {
        "ddp": 4500,
        "gradient_allreduce": 4500,
        "decentralized": 4700,
        "low_precision_decentralized": 16000,
        "qadam_8bit": 17800,
        "bytegrad": 19700,
        "async": 28900,
    },
}
# (Gbit/s, added latency in ms) -> algorithm -> seconds of an epoch of BERT-Large
BERT_LARGE = {
    (100.0, 0.0): {
        "ddp": 125,
        "bytegrad": 86,
        "decentralized_shift_one": 83,
        "low_precision_decentralized": 75,
        "qadam_1bit": 68,
        "async": 61,
    },
    (1.0, 0.0): {
        "ddp": 2580,
        "bytegrad": 700,
        "decentralized_shift_one": 1510,
        "low_precision_decentralized": 730,
        "qadam_1bit": 75,
        "async": 60,
    },
    (100.0, 5.0): {
        "ddp": 905,
        "bytegrad": 465,
        "decentralized_shift_one": 415,
        "low_precision_decentralized": 155,
        "qadam_1bit": 220,
        "async": 60,
    },
}


@dataclass(frozen=True, slots=True)
class Point:
    """published_s, predicted_s: of one step. network_s: for which it keeps a node's interface busy. without_network_s:
    of a step over a network of no cost. is_fitted: it determined a constant of the simulated cluster."""

    model: str
    condition: str
    algorithm: str
    published_s: float
    predicted_s: float
    network_s: float
    without_network_s: float
    is_fitted: bool

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted_s / self.published_s


def points(seed: int = 0) -> list[Point]:
    return [*_vgg16(seed), *_bert_large(seed)]


def speedups(found: list[Point], model: str, condition: str) -> dict[str, tuple[float, float]]:
    """By algorithm: DDP's step over its own, published and predicted."""
    own = {p.algorithm: p for p in found if (p.model, p.condition) == (model, condition)}
    ddp = own["ddp"]
    return {
        name: (ddp.published_s / p.published_s, ddp.predicted_s / p.predicted_s)
        for name, p in own.items()
        if name != "ddp"
    }


def tcp_rates(seed: int = 0) -> dict[str, float]:
    """Returns the bytes a second of a node over TCP with which the simulator repeats published steps at 100 Gbit/s: of
    the three that determined presets.TCP_BYTES_PER_S, and of the exchange in pairs."""
    vgg16, bert = presets.vgg16(), presets.bert_large()
    of_bert = BERT_LARGE[100.0, 0.0]
    found = {}
    for case, algorithm, published_s in (
        (vgg16, "ddp", _vgg16_step_s(100, "ddp")),
        (bert, "ddp", of_bert["ddp"] / presets.BERT_STEPS),
        (vgg16, "gradient_allreduce", _vgg16_step_s(100, "gradient_allreduce")),
        (bert, "decentralized_shift_one", of_bert["decentralized_shift_one"] / presets.BERT_STEPS),
    ):
        cluster = presets.seeds_cluster(case, 100)
        if case is bert:
            cluster = _without_vote(cluster)
        found[f"{case.name}, {algorithm}"] = _rate_of(cluster, case, algorithm, published_s, seed)
    return found


def _without_vote(cluster: Cluster) -> Cluster:
    """The original had no vote in a step: what is compared is the exchange."""
    return replace(cluster, vote_latency_s=0.0, inner_vote_latency_s=0.0)


def _rate_of(cluster: Cluster, case: presets.Case, algorithm: str, step_s: float, seed: int) -> float:
    """Searches by halves: steps become shorter as the rate grows."""
    slow, fast = cluster.network.bandwidth_bytes_per_s / 100, cluster.network.bandwidth_bytes_per_s
    for _ in range(30):
        rate = (slow + fast) / 2
        costs = replace(cluster.costs, transport_s_per_byte=1 / rate)
        found_s = simulate(replace(cluster, costs=costs), case.load, algorithm, seed).step_s
        slow, fast = (rate, fast) if found_s > step_s else (slow, rate)
    return (slow + fast) / 2


def _vgg16_step_s(gbit: int, algorithm: str) -> float:
    return presets.vgg16().batch * WORKERS / VGG16[gbit][algorithm]


def _point(
    cluster: Cluster,
    case: presets.Case,
    condition: str,
    algorithm: str,
    published_s: float,
    is_fitted: bool,
    seed: int,
) -> Point:
    free = replace(
        cluster,
        network=replace(cluster.network, bandwidth_bytes_per_s=_NO_LIMIT),
        costs=replace(cluster.costs, transport_s_per_byte=0.0),
    )
    steps = simulate(cluster, case.load, algorithm, seed)
    without_s = simulate(free, case.load, algorithm, seed).step_s
    return Point(
        case.name, condition, algorithm, published_s, steps.step_s, steps.busy_s, without_s, is_fitted
    )


def _vgg16(seed: int) -> Iterator[Point]:
    case = presets.vgg16()
    for gbit, rates in VGG16.items():
        cluster = presets.seeds_cluster(case, gbit)
        for algorithm in rates:
            is_fitted = algorithm == "async" or (gbit == 100 and algorithm in ("ddp", "gradient_allreduce"))
            published_s = _vgg16_step_s(gbit, algorithm)
            yield _point(cluster, case, f"{gbit} Gbit/s", algorithm, published_s, is_fitted, seed)


def _bert_large(seed: int) -> Iterator[Point]:
    case = presets.bert_large()
    for (gbit, latency_ms), epochs in BERT_LARGE.items():
        cluster = presets.seeds_cluster(case, gbit, latency_ms * _MS if latency_ms else None)
        condition = f"{gbit:g} Gbit/s" + (f", {latency_ms:g} ms" if latency_ms else "")
        for algorithm, epoch_s in epochs.items():
            is_fitted = algorithm == "async" or (algorithm == "ddp" and not latency_ms)
            published_s = epoch_s / presets.BERT_STEPS
            yield _point(_without_vote(cluster), case, condition, algorithm, published_s, is_fitted, seed)
