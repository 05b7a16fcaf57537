"""The common style of the benchmarks' plots, and their location: beside the result's table, linked from it.

Only a kept result needs matplotlib (the extra `bench`); without it the table says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Figure = Callable[[Any], Any]
"""Draws one figure with the pyplot module that it is given, and returns it."""

# One colour and mark for a system in all plots; in grey what is not Bagua. Hues that differ for colour-blind eyes too.
STYLES: dict[str, tuple[str, str]] = {
    "alone": ("#555555", "_"),
    "ddp": ("#111111", "s"),
    "ddp_fp16": ("#777777", "D"),
    "ddp_powersgd": ("#aaaaaa", "^"),
    "ddp_sgd": ("#111111", "s"),
    "ddp_adam": ("#777777", "D"),
    "gradient_allreduce": ("#0072b2", "o"),
    "bytegrad": ("#56b4e9", "v"),
    "decentralized": ("#009e73", "P"),
    "decentralized_shift_one": ("#7fbf3f", "X"),
    "low_precision_decentralized": ("#b8a000", "*"),
    "qadam_uncompressed": ("#c9b27c", "h"),
    "qadam_8bit": ("#e69f00", "<"),
    "qadam_1bit": ("#d55e00", ">"),
    "power_sgd": ("#8c564b", "^"),
    "async": ("#cc3377", "o"),
    "local_sgd": ("#7744aa", "d"),
    "diloco_rounds_uint8": ("#9a6324", "8"),
    "diloco_rounds_int4": ("#d2a679", "D"),
    "streaming_diloco": ("#4b2a86", "p"),
    "streaming_diloco_int4": ("#a58ad6", "H"),
}
DPI = 130


def style(system: str) -> dict[str, Any]:
    """Keywords for matplotlib's plot."""
    colour, mark = STYLES[system]
    is_bagua = system != "alone" and not system.startswith("ddp")
    return {"color": colour, "marker": mark, "linestyle": "-" if is_bagua else "--", "linewidth": 1.6}


def round_ticks(
    values: Sequence[float], around: float = 1.0, digits: Sequence[int] = (1, 2, 5)
) -> tuple[list[float], list[str]]:
    """For a logarithmic axis: `digits` times powers of ten, from the least of `values` over `around` to the most times
    `around`; and how they are written."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    every = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
    inside = [tick for tick in every if min(values) / around <= tick <= max(values) * around]
    return inside, [f"{tick:g}" for tick in inside]


def keep_plots(table: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Draw each figure into <table's stem>-<name>.png, and show them at the end of the table. Returns the paths."""
    if not figures:
        return []
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is missing; pip install -e '.[bench]'", file=sys.stderr)
        _append(table, ["No plots: matplotlib was missing."])
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for name, draw in figures.items():
        figure = draw(pyplot)
        path = table.with_name(f"{table.stem}-{name}.png")
        figure.savefig(path, dpi=DPI, bbox_inches="tight")
        pyplot.close(figure)
        paths.append(path)
    _append(table, [f"![{path.stem}]({path.name})" for path in paths])
    return paths


def _append(table: Path, lines: list[str]) -> None:
    with table.open("a") as stream:
        stream.write("\n" + "\n\n".join(lines) + "\n")
