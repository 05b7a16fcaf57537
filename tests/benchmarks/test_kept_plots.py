"""Plots of kept results: one for each result, of the values that its table has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.kept_plots import KINDS, Bars, draw, figures_of, kind_of, missing, without_plot
from benchmarks.result_file import RESULTS

WITHOUT_RESULT = {"gpu_kernels"}  # until one is kept


def test_every_kept_result_has_a_plot_that_its_table_shows() -> None:
    results = sorted(RESULTS.glob("*.json"))
    assert results and missing(results) == [], "python -m benchmarks.kept_plots draws them"
    assert without_plot(results) == [], (
        "a benchmark without a function in KINDS that draws no plot of its own"
    )
    for plot in RESULTS.glob("*.png"):
        [result] = [r for r in results if re.fullmatch(rf"{re.escape(r.stem)}-[a-z][a-z-]*", plot.stem)]
        assert f"({plot.name})" in result.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", KINDS)
def test_the_functions_read_what_is_kept(name: str) -> None:
    results = [result for result in sorted(RESULTS.glob("*.json")) if kind_of(result) == name]
    assert results or name in WITHOUT_RESULT, "a benchmark whose results are kept"
    for result in results:
        assert figures_of(name, json.loads(result.read_text())["values"]).keys()


def test_kernels_of_a_gpu_are_compared_with_a_copy() -> None:
    """No GPU has run this benchmark yet, so no kept result can show it."""
    rows = [
        {"kernel": "copy", "dtype": "float32", "nbytes": 8, "seconds": [2.0, 2.0, 9.0]},
        {"kernel": "flatten", "dtype": "float32", "nbytes": 6, "seconds": [3.0]},
    ]
    assert KINDS["gpu_kernels"](rows)["share"].values == {
        ("copy", "float32"): [1.0],
        ("flatten", "float32"): [0.5],
    }


def test_the_faults_compare_three_systems() -> None:
    values = json.loads((RESULTS / "faults-2026-11-30.json").read_text())["values"]
    bars = KINDS["faults"](values)["times"]
    assert sorted(series for row, series in bars.values if row == "worker killed") == [
        "bagua",
        "torchft",
        "torchrun",
    ]
    assert len(bars.values["worker killed", "bagua"]) == 3


def test_a_plot_is_linked_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = tmp_path / "submit_start-2026-01-01.json"
    result.write_text(json.dumps({"values": {"foreground_s": [1.0, 2.0], "submitted_s": [3.0]}}))
    table = result.with_suffix(".md")
    table.write_text("# submit_start\n")
    assert missing([result]) == [result]
    [path] = draw(result)
    assert path.name == "submit_start-2026-01-01-start.png" and missing([result]) == []
    once = table.read_text()
    assert once.count(path.name) == 1
    draw(result)
    assert table.read_text() == once


def test_what_was_not_measured_is_left_out() -> None:
    bars = Bars("seconds")
    bars.add("row", "a", 1.0, None, 2.0)
    bars.add("row", "b", None)
    assert bars.values["row", "a"] == [1.0, 2.0] and not bars.values["row", "b"]
