"""The order, the quick choice and the estimate of a run of the suite."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import suite_costs
from tests.lab.wait import HANG_S

ROOT = Path(__file__).parent.parent


def test_the_dearest_file_comes_first_and_an_unknown_one_at_its_assumed_cost() -> None:
    costs = {"cheap": suite_costs.UNKNOWN_COST_S / 2, "dear": suite_costs.UNKNOWN_COST_S * 2}
    assert suite_costs.dearest_first(["cheap", "new", "dear"], costs) == ["dear", "new", "cheap"]


def test_a_budget_pays_for_the_cheapest_files() -> None:
    assert suite_costs.cheapest({"a": 5.0, "b": 1.0, "c": 2.0}, 3.0) == ["b", "c"]


def test_the_estimate_follows_the_pace_so_far() -> None:
    assert suite_costs.remaining_s(10.0, 20.0, 60.0) == pytest.approx(20.0)
    assert suite_costs.remaining_s(10.0, 70.0, 60.0) == 0.0
    assert suite_costs.remaining_s(0.0, 0.0, 60.0) == 60.0
    assert suite_costs.remaining_s(49.0, 0.001, 1400.0) == 1400.0, "nearly nothing has ended"


def test_what_has_ended_counts_by_its_recorded_cost() -> None:
    tests = {"a": 4, "new": 1}
    whole_s = 8.0 + suite_costs.UNKNOWN_COST_S
    assert suite_costs.done_s({"a": 8.0, "b": 5.0}, tests, tests) == whole_s
    assert suite_costs.done_s({"a": 8.0}, tests, {"a": 3}) == 6.0


@pytest.mark.parametrize("path", [suite_costs.COSTS, suite_costs.LONG_COSTS], ids=lambda path: path.name)
def test_every_recorded_file_exists(path: Path) -> None:
    gone = [file for file in suite_costs.recorded(path) if not (ROOT / file).exists()]
    assert not gone, "scripts/test --record-costs renews tests/costs.json, with --long tests/long_costs.json"


@pytest.mark.parametrize(("selection", "kept"), [("not long", "costs.json"), ("", "long_costs.json")])
def test_a_run_orders_its_files_says_a_failure_at_once_and_records_costs(
    tmp_path: Path, selection: str, kept: str
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    source = Path(suite_costs.__file__).read_text()
    (tests / "suite_costs.py").write_text(source)
    (tests / "conftest.py").write_text(
        "from tests.suite_costs import pytest_addoption, pytest_collection_modifyitems, pytest_configure\n"
    )
    (tests / kept).write_text(json.dumps({"tests/test_a.py": 1, "tests/test_b.py": 9}))
    (tests / "test_a.py").write_text("def test_a(): pass\n")
    (tests / "test_b.py").write_text("def test_b(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-m", selection]
    command += ["--record-costs", "tests"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False)
    lines = run.stdout.splitlines()
    begun = [
        line for line in lines if "test_a.py::" in line or "FAILED tests/test_b.py::test_b (call)" in line
    ]
    assert begun[0] == "FAILED tests/test_b.py::test_b (call)", run.stdout
    assert run.returncode == 1
    assert set(json.loads((tests / kept).read_text())) == {"tests/test_a.py", "tests/test_b.py"}


def test_files_of_tests_have_different_names() -> None:
    """pytest imports a test file by its base name, so of two with one name it refuses the second."""
    count = Counter(path.name for path in ROOT.glob("tests/**/test_*.py"))
    assert [name for name, files in count.items() if files > 1] == []
