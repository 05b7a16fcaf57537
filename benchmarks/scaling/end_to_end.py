"""The published gain of whole trainings, "up to 1.95 times", beside what the simulator gives the same models.

The original compared its best algorithm for a model with the best of torch's DDP, Horovod and BytePS (arXiv
2107.01499). It names ByteGrad for VGG16 and 1-bit QAdam for BERT-Large, on 16 nodes of 8 V100 at 100 Gbit/s over TCP
(https://tutorials.baguasys.com/benchmark/). The simulator has neither Horovod nor BytePS. An allreduce of 16-bit
gradients, which Horovod offers, takes the place of the best peer here. A gain of steps is one of a whole training where
both take as many steps, and where QAdam's uncompressed warm-up is short.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scaling import presets
from benchmarks.scaling.steps.step import simulate

PUBLISHED_GAIN = 1.95
"""The largest of all models, over the best peer."""
_USED = ((presets.vgg16, "bytegrad"), (presets.bert_large, "qadam_1bit"))
_GBIT = (100, 25, 10)


@dataclass(frozen=True, slots=True)
class Gain:
    """over_ddp, over_fp16: DDP's step, with gradients in 32 and in 16 bits, over the algorithm's."""

    model: str
    algorithm: str
    gbit: int
    over_ddp: float
    over_fp16: float


def gains(seed: int = 0) -> list[Gain]:
    found = []
    for make, algorithm in _USED:
        case = make()
        for gbit in _GBIT:
            cluster = presets.seeds_cluster(case, gbit)
            own_s, ddp_s, fp16_s = (
                simulate(cluster, case.load, name, seed).step_s for name in (algorithm, "ddp", "ddp_fp16")
            )
            found.append(Gain(case.load.model.name, algorithm, gbit, ddp_s / own_s, fp16_s / own_s))
    return found
