"""Measures an optimizer's step: parameter by parameter, with foreach, with torch's fused kernels, and on blocks.

    python -m benchmarks.fused_optimizer --keep                              # all models and optimizers: about an hour
    python -m benchmarks.fused_optimizer --model "BERT-base" --optimizer AdamW --optimizer RMSprop
    python -m benchmarks.fused_optimizer --device cuda --keep
    python -m benchmarks.fused_optimizer --quick                             # a few seconds: only that it works

All ways of one optimizer take turns in one process, on models of equal values; each round times as many steps as fill
`--round-s`. Gradients are kept from step to step, as after zero_grad(set_to_none=False) or in a runtime's buckets, or
new in each step, as after zero_grad(): those are copied into blocks, within the time. The last column says whether
parameters are equal, bit by bit, to those of the loop after the same number of steps; for compiled steps how far they
are apart. "Memory alone" is what a step would take that did nothing but read and write once what it must, as fast as a
sum of two large tensors in place does in the same minutes: where a loop takes little more, nothing is to be gained.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bagua_core.fused_optimizer import fuse_optimizer
from bagua_core.fused_optimizer.layout_choice import STEPS_TO_SETTLE
from benchmarks import optimizer_models, result_file

WAYS = ("loop", "foreach", "fused", "blocks", "blocks, fused", "compiled")
THIRD_PARTY = {"Lion": "pytorch_optimizer", "AdaBelief": "pytorch_optimizer", "Adan": "pytorch_optimizer"}
NOT_MEASURED = {
    "LBFGS": "needs a closure",
    "SparseAdam": "takes sparse gradients only",
    "Adafactor": "works on parameters as wholes, so fuse_optimizer leaves it as it is",
    "Muon": "works on parameters as wholes, so fuse_optimizer leaves it as it is",
}
OPTIONS: dict[str, dict[str, Any]] = {"SGD, momentum": {"momentum": 0.9}}
# Their foreach, which is their default, takes other steps than their loop: fused, they are given the loop's.
OTHER_STEPS_WITH_FOREACH = {"Adan"}
BANDWIDTH_ELEMENTS = 1 << 24
WARM_UP_STEPS = 3 + STEPS_TO_SETTLE  # fused ones find out in their first steps how they go on


@dataclass(frozen=True, slots=True)
class Row:
    """seconds: of one step, by way, one value for each round. off: largest difference to the loop, relative.
    moved_bytes: parameters, gradients and states read once, parameters and states written once; bytes_s: how many a
    sum of two tensors in place moves in a second, one value for each round; none for models that a cache holds."""

    model: str
    optimizer: str
    gradients: str
    seconds: dict[str, list[float]]
    off: dict[str, float]
    moved_bytes: int
    bytes_s: list[float]

    @property
    def memory_s(self) -> float:
        """What a step takes at least if nothing of it lies in a cache."""
        return self.moved_bytes / statistics.median(self.bytes_s)

    def median_s(self, way: str) -> float | None:
        return statistics.median(self.seconds[way]) if way in self.seconds else None

    def times_faster(self, way: str, than: Sequence[str]) -> float | None:
        """Than the best of those."""
        own, others = self.median_s(way), [s for s in map(self.median_s, than) if s is not None]
        return min(others) / own if own is not None and others else None


def optimizer_classes(third_party: bool = True) -> tuple[dict[str, type[Any]], list[str]]:
    """By the name of a row, and what is left out, with the reason. third_party: import those of other packages too."""
    found = {
        name: kind
        for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    left_out = [f"{name}: {why}" for name, why in NOT_MEASURED.items() if found.pop(name, None)]
    found["SGD, momentum"] = torch.optim.SGD
    for name, module in THIRD_PARTY.items() if third_party else ():
        try:
            found[f"{name} ({module})"] = getattr(importlib.import_module(module), name)
        except ImportError as error:
            left_out.append(f"{name} ({module}): {error}; pip install {module.replace('_', '-')}")
    return found, left_out


def ways_of(name: str, kind: type[Any], device: torch.device) -> dict[str, Callable[[Any], Any]]:
    """How to make each of the compared optimizers for given parameters."""
    options = {"lr": 1e-4, **OPTIONS.get(name, {})}

    def takes(**more: Any) -> bool:
        try:
            kind([torch.nn.Parameter(torch.ones(2, device=device))], **options, **more)
        except (TypeError, ValueError, RuntimeError):  # no such argument, or not on this device
            return False
        return "foreach" in inspect.signature(kind).parameters

    ways: dict[str, Callable[[Any], Any]] = {}
    if takes(foreach=False):
        ways["loop"] = lambda p: kind(p, **options, foreach=False)
        ways["foreach"] = lambda p: kind(p, **options, foreach=True)
    else:
        ways["loop"] = lambda p: kind(p, **options)
    if "fused" in inspect.signature(kind).parameters and takes(fused=True):  # some swallow any word
        ways["fused"] = lambda p: kind(p, **options, fused=True)
        ways["blocks, fused"] = lambda p: fuse_optimizer(kind(p, **options, fused=True))
    fused = {**options, "foreach": False} if kind.__name__ in OTHER_STEPS_WITH_FOREACH else options
    ways["blocks"] = lambda p: fuse_optimizer(kind(p, **fused))
    ways["compiled"] = lambda p: fuse_optimizer(kind(p, **fused), compile=True)
    return {way: ways[way] for way in WAYS if way in ways}


class Contestant:
    """One optimizer with a model of its own."""

    def __init__(self, make: Callable[[Any], Any], model: str, device: torch.device, keeps: bool) -> None:
        self.parameters = optimizer_models.parameters(optimizer_models.MODELS[model](), device)
        self.optimizer = make(self.parameters)
        self._gradients = [p.grad for p in self.parameters]
        self._keeps = keeps
        self._device = device
        self.steps = 0

    def step_s(self) -> float:
        if not self._keeps:
            for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                assert gradient is not None
                parameter.grad = gradient.clone()
        self._wait()
        begun_s = time.perf_counter()
        self.optimizer.step()
        self._wait()
        self.steps += 1
        return time.perf_counter() - begun_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def moved_bytes(self) -> int:
        """See Row."""
        states = [
            v
            for state in self.optimizer.state.values()
            for v in state.values()
            if isinstance(v, torch.Tensor)
        ]
        return sum(3 * p.nbytes for p in self.parameters) + sum(2 * v.nbytes for v in states if v.dim())

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])


def measure(
    model: str,
    name: str,
    kind: type[Any],
    keeps: bool,
    rounds: int,
    round_s: float,
    device: torch.device,
    skip: set[str],
) -> Row:
    ways = {w: make for w, make in ways_of(name, kind, device).items() if w not in skip}
    contestants = {way: Contestant(make, model, device, keeps) for way, make in ways.items()}
    steps = 1
    for one in contestants.values():
        taken = [one.step_s() for _ in range(WARM_UP_STEPS + 1)]
        steps = max(steps, min(50, int(round_s / taken[-1])))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    bytes_s = []
    for number in range(rounds):
        if model not in optimizer_models.SMALL:
            bytes_s.append(bandwidth_bytes_s(device))
        order = list(contestants)
        for way in order[number % len(order) :] + order[: number % len(order)]:
            one = contestants[way]
            seconds[way].append(statistics.median(one.step_s() for _ in range(steps)))
    expected = contestants["loop"].values()
    scale = float(expected.abs().max())
    off = {
        way: float((one.values() - expected).abs().max()) / scale
        for way, one in contestants.items()
        if way != "loop"
    }
    moved_bytes = contestants["loop"].moved_bytes()
    return Row(model, name, "kept" if keeps else "new", seconds, off, moved_bytes, bytes_s)


def bandwidth_bytes_s(device: torch.device) -> float:
    """The best of some sums, in place, of two tensors that fit no cache."""
    one, other = (torch.ones(BANDWIDTH_ELEMENTS, device=device) for _ in range(2))
    seconds = []
    for _ in range(5):
        begun_s = time.perf_counter()
        one.add_(other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun_s)
    return (2 * one.nbytes + other.nbytes) / min(seconds)


def cells(row: Row, fused_adamw_s: float | None) -> list[str]:
    def ms(way: str) -> str:
        median_s = row.median_s(way)
        return "-" if median_s is None else f"{1000 * median_s:.3g}"

    def times(ratio: float | None) -> str:
        return "-" if ratio is None else f"{ratio:.2f}"

    compiled_s = row.median_s("compiled")
    return [
        row.model,
        row.optimizer,
        row.gradients,
        *(ms(way) for way in WAYS),
        "-" if row.model in optimizer_models.SMALL else f"{1000 * row.memory_s:.3g}",  # a cache holds those
        times(row.times_faster("blocks", ["loop"])),
        times(row.times_faster("blocks", ["loop", "foreach"])),
        times(None if compiled_s is None or fused_adamw_s is None else compiled_s / fused_adamw_s),
        "same bits" if row.off.get("blocks") == 0 else f"{row.off.get('blocks', 0):.0e}",
        "-" if "compiled" not in row.off else f"{row.off['compiled']:.0e}",
    ]


HEAD = [
    "model",
    "optimizer",
    "gradients",
    *(f"{way}, ms" for way in WAYS),
    "memory alone, ms",
    "blocks: times faster than the loop",
    "than the better of loop and foreach",
    "compiled over torch's fused AdamW",
    "blocks against the loop",
    "compiled against it",
]


def table(rows: Sequence[Row]) -> str:
    """The fused AdamW to which compiled steps are compared is that of the same model and gradients in the same
    run."""
    adamw = {(r.model, r.gradients): r.median_s("fused") for r in rows if r.optimizer == "AdamW"}
    return result_file.table(HEAD, [cells(r, adamw.get((r.model, r.gradients))) for r in rows])


def part_of_models(models: Sequence[str]) -> list[str]:
    """The part of the benchmark in a kept result's name: the sizes of its models, if not both were measured."""
    sizes = ["small_models" if model in optimizer_models.SMALL else "large_models" for model in models]
    return result_file.part_of(sizes, ["small_models", "large_models"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=list(optimizer_models.MODELS))
    parser.add_argument("--optimizer", action="append", help="as in the table; all if left out")
    parser.add_argument(
        "--gradients", choices=["kept", "new", "both"], default="both", help="of small models; else kept"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-s", type=float, default=0.2)
    parser.add_argument("--threads", type=int, help="torch's default if left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled step out")
    parser.add_argument(
        "--quick", action="store_true", help="one small model, three of torch's optimizers, one round"
    )
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/fused_optimizer-<date>")
    options = parser.parse_args(arguments)
    about = result_file.circumstances()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or its workers start while others are timed
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
    # a quick run takes torch's own: importing the others takes as long as the run
    classes, left_out = optimizer_classes(third_party=bool(options.optimizer) or not options.quick)
    unknown = set(options.optimizer or ()) - set(classes)
    if unknown:
        parser.error(f"--optimizer {sorted(unknown)}: choose from {sorted(classes)}")
    models = options.model or list(optimizer_models.MODELS)
    names = options.optimizer or sorted(classes)
    if options.quick:
        models, names = (
            models if options.model else [optimizer_models.SMALL[0]],
            options.optimizer or ["SGD", "AdamW", "RMSprop"],
        )
        options.rounds, options.round_s = 1, 0.0
    skip = {"compiled"} if options.no_compile or options.quick else set()
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of compiled steps that cannot be: the table shows it
        for model in models:
            modes = {"kept": [True], "new": [False], "both": [True, False]}[options.gradients]
            for keeps in modes if model in optimizer_models.SMALL else modes[:1]:
                for name in names:
                    rows.append(
                        measure(
                            model, name, classes[name], keeps, options.rounds, options.round_s, device, skip
                        )
                    )
                    if model not in optimizer_models.SMALL:
                        gc.collect()  # a model's memory, before the next needs as much
                    print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    words = "\n".join(
        [
            f"Device: {about.get('gpu', 'the processor')}. Threads: {torch.get_num_threads()}. "
            f"Medians of {options.rounds} rounds. Learning rate 1e-4, other options as by default.",
            "",
            table(rows),
            "",
            *(f"Left out: {one}." for one in left_out),
        ]
    )
    print(f"{result_file.in_words(about)}\n\n{words}")
    if options.keep:
        values = [asdict(row) for row in rows]
        for path in result_file.keep("fused_optimizer", about, words, values, part_of_models(models)):
            print(path.relative_to(result_file.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
