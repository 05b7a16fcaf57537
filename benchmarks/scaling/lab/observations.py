"""The settings in which steps are measured on lab hosts, and what was measured. Knows no job and no simulator.

A setting is either for the fit or held out: a prediction is only tested on settings that the fit did not see.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result_file import RESULTS

ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "qadam_1bit",
    "decentralized",
    "decentralized_shift_one",
    "low_precision_decentralized",
    "local_sgd",
    "async",
)
"""Those that --calibrate measures on lab hosts, and to whose steps costs are fitted."""
NEVER_FITTED = ("ddp", "ddp_fp16", "qadam_8bit")
"""Those of the kept result of benchmarks.tradeoff of which all steps are held out."""
NOT_VALIDATED = {
    "streaming_diloco_int4": "its only kept steps are of another run, at one rate, which fits no costs",
}
"""The simulator's other algorithms, each with the reason."""
# Their steps differ in cost by design, so the mean counts.
IN_CYCLES = frozenset({"local_sgd", "async"})
SMALL = (270_000,) * 6  # 6.5 MB in six buckets of a MiB
LARGE = (540_000, 270_000, 1_080_000, 300_000)  # of other shapes, in as many buckets
COMPUTE_S = 0.06
BUCKET_CAP_MB = 1.0
TRADEOFF = RESULTS / "tradeoff-2026-11-21.json"
LAB = RESULTS / "scaling_calibration_lab-2026-11-29.json"


@dataclass(frozen=True, slots=True)
class Setting:
    """rate: of every link, as tc takes it. sizes: elements of the model's tensors. compute_s: of a worker's step.
    repeats: jobs of each algorithm. computes: a processor does, not a sleep: its time is then fitted, too."""

    hosts: int
    rate: str
    sizes: tuple[int, ...]
    compute_s: float = COMPUTE_S
    repeats: int = 1
    held_out: bool = False
    bucket_cap_mb: float = BUCKET_CAP_MB
    computes: bool = False

    def __str__(self) -> str:
        return f"{self.hosts} hosts, {self.rate}, {sum(self.sizes) / 1e6:.1f} M parameters"


FIT = (
    Setting(4, "100mbit", SMALL),
    Setting(2, "1gbit", SMALL),
    Setting(4, "1gbit", LARGE),
    Setting(4, "10gbit", SMALL),
)
HELD_OUT = (
    Setting(3, "200mbit", LARGE, held_out=True),
    Setting(6, "500mbit", SMALL, held_out=True),
    Setting(3, "5gbit", LARGE, repeats=2, held_out=True),
)
TINY = (Setting(2, "1gbit", (30_000, 20_000), compute_s=0.01),)
"""For the test of the mechanics."""


@dataclass(frozen=True, slots=True)
class Observation:
    """All steps that count, of all repeats of a setting, on the first rank. processor_s: that a worker's process needs
    in a step, in all its threads and in the kernel, the mean; 0: not measured."""

    setting: Setting
    algorithm: str
    step_s: tuple[float, ...]
    processor_s: float = 0.0

    @property
    def typical_s(self) -> float:
        middle = statistics.fmean if self.algorithm in IN_CYCLES else statistics.median
        return middle(self.step_s)

    @property
    def spread_s(self) -> tuple[float, float]:
        """The least and the most; of the means of tenths where steps differ by design."""
        if self.algorithm not in IN_CYCLES:
            return min(self.step_s), max(self.step_s)
        size = max(1, len(self.step_s) // 10)
        means = [
            statistics.fmean(self.step_s[i : i + size]) for i in range(0, len(self.step_s) - size + 1, size)
        ]
        return min(means), max(means)


def is_at_most_1gbit(rate: str) -> bool:
    return not rate.endswith("gbit") or float(rate.removesuffix("gbit")) <= 1


def from_tradeoff(path: Path = TRADEOFF, held_out: Sequence[str] = ("1gbit",)) -> list[Observation]:
    """Of a kept result of benchmarks.tradeoff: four hosts, 16.8 M parameters, links without delay, where processors
    compute. Its steps at the links of `held_out`, and those of NEVER_FITTED, are not for the fit."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["values"]["runs"]
    sizes = (2048 * 2048, 2048) * 4 + (2048 * 16, 16)
    grouped: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["system"] in (*ALGORITHMS, *NEVER_FITTED) and not run["condition"]["delay_ms"]:
            assert run["parameters"] == sum(sizes), "the model of benchmarks.tradeoff has changed"
            grouped.setdefault((run["system"], run["condition"]["rate"]), []).extend(run["step_s"])
    return [
        Observation(
            Setting(
                4,
                rate,
                sizes,
                0.0,
                held_out=rate in held_out or algorithm in NEVER_FITTED,
                bucket_cap_mb=25.0,
                computes=True,
            ),
            algorithm,
            tuple(steps),
        )
        for (algorithm, rate), steps in grouped.items()
    ]


def from_lab(path: Path = LAB) -> list[Observation]:
    """Of a kept result of a calibration on lab hosts."""
    kept: list[dict[str, Any]] = json.loads(path.read_text())["values"]["observations"]
    return [
        Observation(
            Setting(**{**one["setting"], "sizes": tuple(one["setting"]["sizes"])}),
            one["algorithm"],
            tuple(one["step_s"]),
            one.get("processor_s", 0.0),
        )
        for one in kept
    ]


KEPT: dict[str, Callable[[], list[Observation]]] = {"tradeoff": from_tradeoff, "lab": from_lab}
