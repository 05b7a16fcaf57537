"""Writes a benchmark's result, with a description of the machine, to dated files: text and JSON.

Independent of what was measured.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import kept_plots
from benchmarks.plots import Figure, keep_plots

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGAN_S = "began_s"  # of this process's clock, so a result has the duration in its place
ROW_LEVELS = 3  # of a kept JSON file: the document, its values, their rows


def circumstances() -> dict[str, Any]:
    """Hardware, versions, commit, command and date of this run.

    Call it when the run begins: `keep` writes the time that has passed since.
    """
    return {
        BEGAN_S: time.monotonic(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", f"benchmarks.{_module(Path(sys.argv[0]))}", *sys.argv[1:]]),
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "load_at_start": os.getloadavg()[0],
    }


def _module(script: Path) -> str:
    """The benchmark's name: of its file, or of its package."""
    return script.parent.name if script.stem == "__main__" else script.stem


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit} with {len(changed.splitlines())} changed files" if changed else commit


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def in_words(about: Mapping[str, Any]) -> str:
    took = f", took {about['took_s']:.0f} s" if "took_s" in about else ""
    return (
        f"{about['date']}, commit {about['commit']}, {about['processor']}, {about['cores']} cores, "
        f"{about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, Python {about['python']}, "
        f"torch {about['torch']}, load at the start {about['load_at_start']:.1f}{took}\n\n    {about['command']}"
    )


def _with_duration(about: Mapping[str, Any]) -> dict[str, Any]:
    took_s = round(time.monotonic() - about[BEGAN_S], 1)
    return {name: value for name, value in about.items() if name != BEGAN_S} | {"took_s": took_s}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as plain text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])


def spread(values: Sequence[float], unit: str = "s", digits: int = 2) -> str:
    """Median, range and count."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f} {unit}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f}, n={len(values)})"


def newest(name: str) -> Any:
    """The values of the newest kept result of that name; None: there is none."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob(f"{name}-[0-9]*.json")]
    return max(found, key=lambda one: one["about"]["date"])["values"] if found else None


def part_of(chosen: Sequence[str], known: Iterable[str]) -> list[str]:
    """What of a benchmark is measured where only some of `known` were chosen; empty if all or none were."""
    some = sorted(set(chosen))
    return [] if set(known) <= set(some) else some


def json_rows(value: Any, levels: int = ROW_LEVELS) -> str:
    """Returns `value` as JSON in few lines. A list or an object that lies `levels` deep, or holds plain values only, is
    one line."""
    indent = " " * (ROW_LEVELS - levels)
    below = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if levels == 0 or not any(isinstance(part, (dict, list, tuple)) for part in below):
        return json.dumps(value)
    if isinstance(value, dict):
        names = (k if isinstance(k, str) else json.dumps(k) for k in value)
        parts = [f"{json.dumps(n)}: {json_rows(v, levels - 1)}" for n, v in zip(names, below, strict=True)]
        ends = "{}"
    else:
        parts, ends = [json_rows(part, levels - 1) for part in value], "[]"
    lines = ",\n".join(f"{indent} {part}" for part in parts)
    return f"{ends[0]}\n{lines}\n{indent}{ends[1]}"


class NoPlotError(Exception):
    """A benchmark's result was written, and the benchmark has no plot."""


def keep(
    name: str,
    about: dict[str, Any],
    words: str,
    values: Any,
    part: Sequence[str] = (),
    figures: Mapping[str, Figure] | None = None,
) -> list[Path]:
    """Write <name>-<date>.md and .json and the result's plots; a second run of one day gets a number, and no file is
    replaced. Returns the paths.

    about: what circumstances() returned when the run began.
    part: what of the benchmark was measured, if not all. It is in the file's name, so that the newest result of the
    benchmark's own name has all rows.
    figures: the plots by name; without them those that kept_plots.py has for the benchmark.
    Raises NoPlotError after the result is written if there are none.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = _with_duration(about)
    day = about["date"][:10]
    whole_name = "_".join([name, *part])
    stem, number = f"{whole_name}-{day}", 1
    while (RESULTS / f"{stem}.json").exists():
        number += 1
        stem = f"{whole_name}-{day}-{number}"
    paths = [RESULTS / f"{stem}.md", RESULTS / f"{stem}.json"]
    paths[0].write_text(f"# {whole_name}, {day}\n\n{in_words(about)}\n\n{words}\n")
    paths[1].write_text(json_rows({"about": about, "values": values}) + "\n")
    kept = json.loads(paths[1].read_text())["values"]
    found = kept_plots.figures_of(name, kept) if figures is None else figures
    if not found:
        raise NoPlotError(
            f"{paths[1]} is written, but {name} has no plot: add a function of that name to benchmarks/kept_plots.py, "
            "then run `python -m benchmarks.kept_plots`"
        )
    return paths + keep_plots(paths[0], found)
