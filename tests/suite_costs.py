"""Orders the test files by their cost, picks the cheapest for a quick run, and says how far a run is.

A file's cost is the wall time of its tests, in seconds, recorded in costs.json by `scripts/test --record-costs`, and in
long_costs.json with its long tests by `scripts/test --long --record-costs`. The dearest files come first, so that the
lanes of a whole run end together. Costs only order and estimate: a file without a record counts as UNKNOWN_COST_S, and
no test passes or fails by a cost. conftest.py takes the hooks from here.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

COSTS = Path(__file__).with_name("costs.json")
LONG_COSTS = Path(__file__).with_name("long_costs.json")
UNKNOWN_COST_S = 3.0
_SAY_EVERY_S = 30.0
_SHOWN_OF_FAILURE = 6000  # characters; pytest shows all of it at the end, of a run that comes to its end


def dearest_first(files: Iterable[str], costs: Mapping[str, float]) -> list[str]:
    """The files by falling cost; files of one cost in their own order."""
    return sorted(files, key=lambda file: -costs.get(file, UNKNOWN_COST_S))


def cheapest(costs: Mapping[str, float], budget_s: float) -> list[str]:
    """As many of the files as the budget pays for, the cheapest first."""
    chosen, spent = [], 0.0
    for file in sorted(costs, key=lambda file: (costs[file], file)):
        spent += costs[file]
        if spent > budget_s:
            break
        chosen.append(file)
    return chosen


def done_s(costs: Mapping[str, float], tests: Mapping[str, int], ended: Mapping[str, int]) -> float:
    """The recorded cost of what has ended, in seconds; tests, ended: numbers of tests by file.

    Not what it took: on a machine that is slower than the recorded one, the run would seem to be over too early.
    """
    return sum(costs.get(file, UNKNOWN_COST_S) * ended.get(file, 0) / count for file, count in tests.items())


def remaining_s(elapsed_s: float, done_s: float, whole_s: float) -> float:
    """Seconds that a run still takes if the rest goes at the pace of what is done; whole_s is its recorded cost.

    A test counts when it ends: before 1 % is done, the pace says nothing, and the recorded cost is the estimate.
    """
    return elapsed_s * max(whole_s - done_s, 0.0) / done_s if done_s > whole_s / 100 else whole_s


def recorded(path: Path = COSTS) -> dict[str, float]:
    """Costs by file's path below the repository's root."""
    costs: dict[str, float] = json.loads(path.read_text())
    return costs


def costs_of(config: pytest.Config) -> Path:
    """The records for a run with this selection of tests."""
    return COSTS if "not long" in config.getoption("markexpr") else LONG_COSTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-costs",
        action="store_true",
        help="write the cost of each test file beside tests/suite_costs.py",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = dict.fromkeys(_file(item.nodeid) for item in items)
    order = {file: place for place, file in enumerate(dearest_first(files, recorded(costs_of(config))))}
    items.sort(key=lambda item: order[_file(item.nodeid)])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # one process of a run counts, not each lane
        config.pluginmanager.register(_Progress(config), "suite-progress")


class _Progress:
    """Counts what has run, and says it from time to time."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._costs: Counter[str] = Counter()
        self._failed = 0
        self._recorded: Mapping[str, float] = {}
        self._tests: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._began_s = self._said_s = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._expect(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    def _expect(self, ids: list[str]) -> None:
        if ids:
            self._recorded = recorded(costs_of(self._config))
            self._tests = Counter(_file(nodeid) for nodeid in ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._costs[_file(report.nodeid)] += report.duration
        self._ended[_file(report.nodeid)] += report.when == "teardown"
        now_s = time.monotonic()
        if report.failed:
            self._failed += 1
            why = report.longreprtext[-_SHOWN_OF_FAILURE:]
            self._say(f"FAILED {report.nodeid} ({report.when})\n{why}")
        if now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            elapsed_s = now_s - self._began_s
            whole_s = done_s(self._recorded, self._tests, self._tests)
            left_s = remaining_s(elapsed_s, done_s(self._recorded, self._tests, self._ended), whole_s)
            self._say(f"{_minutes(elapsed_s)} run, about {_minutes(left_s)} left, {self._failed} failed")

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("record_costs"):
            costs = {file: round(cost, 1) for file, cost in sorted(self._costs.items())}
            costs_of(self._config).write_text(json.dumps(costs, indent=0) + "\n")

    def _say(self, line: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"\n{line}")


def _file(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    print("\n".join(cheapest(recorded(), float(sys.argv[1]))))
