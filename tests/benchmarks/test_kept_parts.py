"""A kept result of a part of a benchmark has a name of its own and replaces nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import optimizer_models, result_file
from benchmarks.fidelity_runs import deadline_s
from benchmarks.fused_optimizer import part_of_models
from benchmarks.kept_plots import kind_of

WHOLE = ["ddp", "round", "step"]


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ([], []),
        (["step"], ["step"]),
        (["step", "ddp", "step"], ["ddp", "step"]),
        (["round", "ddp", "step"], []),
        (["other"], ["other"]),
    ],
)
def test_a_part_is_what_was_chosen_unless_that_is_all(chosen: list[str], part: list[str]) -> None:
    assert result_file.part_of(chosen, WHOLE) == part


def test_sizes_of_models_are_parts_of_fused_optimizer() -> None:
    small, large = list(optimizer_models.SMALL), ["BERT-base", "ViT-B/16"]
    assert part_of_models(small[:1]) == ["small_models"]
    assert part_of_models(large) == ["large_models"]
    assert part_of_models([*small, *large]) == []


def test_a_part_lies_beside_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    about = {**result_file.circumstances(), "date": "2026-01-02T00:00:00"}
    for rows, part in (("all", []), ("one", ["step"]), ("again", []), ("another", ["step"])):
        result_file.keep("some", about, rows, {"rows": rows}, part, {"line": _line})
    found = {path.name: json.loads(path.read_text())["values"]["rows"] for path in tmp_path.glob("*.json")}
    assert found == {
        "some-2026-01-02.json": "all",
        "some_step-2026-01-02.json": "one",
        "some-2026-01-02-2.json": "again",
        "some_step-2026-01-02-2.json": "another",
    }
    assert (tmp_path / "some_step-2026-01-02.md").read_text().startswith("# some_step, 2026-01-02\n")


def test_a_result_says_how_long_its_measurement_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    about = result_file.circumstances()
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 75.0)
    text, values, *_ = result_file.keep("some", about, "words", [1], figures={"line": _line})
    kept = json.loads(values.read_text())["about"]
    assert kept["took_s"] == pytest.approx(75.0, abs=5.0) and result_file.BEGAN_S not in kept
    assert f", took {kept['took_s']:.0f} s\n" in text.read_text()
    assert "took" not in result_file.in_words(about), "it has not ended"


def _line(pyplot: Any) -> Any:
    figure, axes = pyplot.subplots()
    axes.plot([1, 2])
    return figure


def test_a_result_without_a_plot_is_written_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    about = {**result_file.circumstances(), "date": "2026-01-02T00:00:00"}
    with pytest.raises(result_file.NoPlotError, match="some has no plot: add a function"):
        result_file.keep("some", about, "words", [1, 2])
    assert json.loads((tmp_path / "some-2026-01-02.json").read_text())["values"] == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        {
            "about": {"date": "x", "hosts": [1]},
            "values": [{"row": 1, "all": [{"s": [1.5, None]}]}, {"row": 2, "all": []}],
        },
        [1, (2, 3), {"a": {"b": {"c": {"d": [1, {"e": 2}]}}}}],
        {"1": {2: [True], None: {"f": float("inf")}}, 'quoted "\n': {}},
        {},
        "plain",
    ],
)
def test_a_kept_file_has_a_line_for_each_row_and_the_values_that_were_measured(value: Any) -> None:
    text = result_file.json_rows(value)
    assert json.loads(text) == json.loads(json.dumps(value))
    assert text.count("\n") <= json.dumps(value, indent=1).count("\n")


def test_a_row_is_one_line_and_so_is_what_lies_deeper() -> None:
    rows = [{"name": "a", "median_s": 1.0}, {"name": "b", "all_s": [{"first": [1.0, 2.0]}]}]
    lines = result_file.json_rows({"about": {"date": "x"}, "values": rows}).splitlines()
    assert json.loads(lines[3].rstrip(",")) == rows[0]
    assert lines[4:8] == ["  {", '   "name": "b",', '   "all_s": [{"first": [1.0, 2.0]}]', "  }"]


def test_kept_files_are_written_in_rows() -> None:
    paths = sorted(result_file.RESULTS.glob("*.json"))
    assert paths
    others = [
        path.name
        for path in paths
        if path.read_text() != result_file.json_rows(json.loads(path.read_text())) + "\n"
    ]
    assert not others, "write them again with result_file.json_rows"


def test_plots_of_a_part_are_those_of_its_benchmark() -> None:
    names = ("uneven_workers", "uneven_workers_round_step", "scaling_calibration", "sharded_faults")
    kinds = [kind_of(Path(f"{name}-2026-01-02-2.json")) for name in names]
    assert kinds == ["uneven_workers", "uneven_workers", "scaling_calibration", "sharded"]


def test_a_long_training_has_as_much_time_as_its_steps_may_take() -> None:
    assert deadline_s(180) == 300
    assert deadline_s(3 * 2048) > 1200
