"""benchmarks.examples refuses an example that fails, or that takes longer than a minute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import examples, result_file
from benchmarks.kept_plots import KINDS
from tests.docs.test_examples import scripts


@pytest.mark.parametrize(
    ("seconds", "as_expected", "shown", "code"),
    [(59.0, True, "yes", 0), (61.0, True, "no", 1), (5.0, False, "failed", 1)],
)
def test_the_limit_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    seconds: float,
    as_expected: bool,
    shown: str,
    code: int,
) -> None:
    def measure(example: examples.Example) -> examples.Taken:
        slow = example.name == "digits.py"
        return examples.Taken(
            example=example.name,
            command="bagua-launch",
            seconds=seconds if slow else 1.0,
            as_expected=as_expected or not slow,
        )

    monkeypatch.setattr(examples, "measure", measure)
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    monkeypatch.setattr(result_file, "keep_plots", lambda table, figures: list(figures))
    assert examples.main(["--keep"]) == code
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(rows) == len(examples.measured())
    assert {example.path for example in examples.measured()} >= set(scripts())
    assert [row[2].strip() for row in rows if "digits.py`" in row[0] and "_" not in row[0]] == [shown]
    [kept] = tmp_path.glob("examples-*.json")
    bars = KINDS["examples"](json.loads(kept.read_text())["values"])["times"]
    assert bars.values["digits.py", "an example"] == [seconds]


def test_each_algorithm_of_an_example_for_slow_links_has_a_row() -> None:
    rows = {example.name: example for example in examples.measured() if example.path.name == "slow_links.py"}
    assert {
        "slow_links.py",
        "slow_links.py --algorithm power_sgd",
        "slow_links.py --algorithm local_sgd",
    } <= set(rows)
    assert len({str(row.lines) for row in rows.values()}) == len(rows)


def test_the_cells_of_the_notebook_are_measured() -> None:
    pytest.importorskip("cloudpickle")
    [example] = (example for example in examples.measured() if example.path.suffix == ".ipynb")
    taken = examples.measure(example)
    assert taken["as_expected"] and taken["seconds"] > 0
    assert (taken["example"], taken["command"]) == ("notebook.ipynb", "python cells.py")


def test_an_example_is_started_as_it_says() -> None:
    [example] = (example for example in examples.measured() if example.name == "original_script.py")
    taken = examples.measure(example)
    assert taken["as_expected"] and taken["seconds"] > 0
    assert taken["command"].startswith("bagua-launch --nproc-per-node 2 examples/original_script.py")
