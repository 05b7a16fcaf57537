"""The published measurements of the original Bagua, beside the simulator's predictions for the same cluster.

Values are read off the figures of arXiv 2107.01499: 16 nodes of 8 V100, TCP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.scaling import presets
from benchmarks.scaling.steps.step import simulate

WORKERS = 128
_MS = 1e-3

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
    """published_s, predicted_s: of one step. is_fitted: it determined a constant of the simulated cluster."""

    model: str
    condition: str
    algorithm: str
    published_s: float
    predicted_s: float
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


def _vgg16(seed: int) -> Iterator[Point]:
    case = presets.vgg16()
    for gbit, rates in VGG16.items():
        cluster = presets.seeds_cluster(case, gbit)
        for algorithm, per_s in rates.items():
            predicted_s = simulate(cluster, case.load, algorithm, seed).step_s
            is_fitted = algorithm == "async" or (gbit == 100 and algorithm in ("ddp", "gradient_allreduce"))
            published_s = case.batch * WORKERS / per_s
            yield Point("VGG16", f"{gbit} Gbit/s", algorithm, published_s, predicted_s, is_fitted)


def _bert_large(seed: int) -> Iterator[Point]:
    case = presets.bert_large()
    for (gbit, latency_ms), epochs in BERT_LARGE.items():
        cluster = presets.seeds_cluster(case, gbit, latency_ms * _MS if latency_ms else None)
        condition = f"{gbit:g} Gbit/s" + (f", {latency_ms:g} ms" if latency_ms else "")
        for algorithm, epoch_s in epochs.items():
            # the original had no vote in a step: what is compared is the exchange
            silent = replace(cluster, vote_latency_s=0.0, inner_vote_latency_s=0.0)
            predicted_s = simulate(silent, case.load, algorithm, seed).step_s
            is_fitted = algorithm == "async" or (algorithm == "ddp" and not latency_ms)
            yield Point(
                "BERT-Large", condition, algorithm, epoch_s / presets.BERT_STEPS, predicted_s, is_fitted
            )
