"""The times in the first table of docs/guide/what-happens.md are medians of the results that they link to. A time
of one trial is called so wherever it is printed. Each row has lines of the terminal, or a sentence about them."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import fault_rows as rows
from benchmarks.result_file import RESULTS
from tests.docs.page_blocks import ROOT, blocks

ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|", re.MULTILINE)
TIME = re.compile(r"\[([\d.]+) s\]\([./]*benchmarks/results/([a-z_]+)([\d-]+)\.md\)")
RESULT = re.compile(r"benchmarks/results/([a-z_]+)([\d-]+)\.md")
PASSAGE = re.compile(r"\n(?=- |\||\n)")  # an item, a row, a paragraph
SECONDS = re.compile(r"(\d+)\.?(\d*) s\b")
Values = Callable[[Any], list[float]]


def _fault(row: rows.Row) -> Values:
    return lambda kept: [
        found["value_s"]
        for trial in kept["trials"]
        if trial["system"] == "bagua"
        for found in trial["measured"]
        if found["row"] == row.name and not found.get("of_leader", False)
    ]


def _restart(system: str, name: str) -> Values:
    return lambda kept: [
        trial[name] for trial in kept["stock"] if trial["system"] == system and trial[name] is not None
    ]


def _rescale(name: str) -> Values:
    return lambda kept: [
        trial[name] for trial in kept if trial["system"] == "bagua" and trial[name] is not None
    ]


FAULTS: dict[str, list[Values]] = {
    "a worker is killed": [_fault(rows.WORKER_KILLED)],
    "the script raises, within `--max-restarts`": [_fault(rows.SCRIPT_RAISES)],
    "the script raises, beyond it": [_fault(rows.SCRIPT_RAISES_BEYOND)],
    "an agent is killed": [_fault(rows.AGENT_KILLED)],
    "all processes of a host are killed": [_rescale("kill_s")],
    "the leading agent's host is killed": [_rescale("leader_kill_s")],
    "a host falls silent (power)": [_fault(rows.HOST_SILENT)],
    "a host's link is cut": [_rescale("cut_s")],
    "a node gets SIGTERM or Ctrl-C": [_fault(rows.SIGTERM)],
    "a node joins": [_rescale("join_s")],
    "one of three members of etcd is killed": [_fault(rows.ETCD_MEMBER)],
    "etcd is gone and comes back": [_fault(rows.ETCD_AWAY)],
    "fewer nodes than the least number, then enough": [_fault(rows.BELOW_MINIMUM)],
    "a worker hangs": [_fault(rows.WORKER_HANGS)],
    "ranks call different collectives": [_fault(rows.RANKS_DISAGREE)],
    "every worker with the state is lost": [_fault(rows.STATE_LOST)],
    "a script for torchrun loses a host": [_restart("bagua", "kill_s"), _restart("torchrun", "kill_s")],
}
LINES = {  # the block of the terminal that each row has; in quotes the sentence that says why it has none
    "a worker is killed": "a worker is killed",
    "the script raises, within `--max-restarts`": "the script raises and starts again",
    "the script raises, beyond it": "the script raises",
    "an agent is killed": "an agent is killed",
    "all processes of a host are killed": "a host is killed",
    "the leading agent's host is killed": "the leader is killed",
    "a host falls silent (power)": '"A host that loses its power shows the same on the others."',
    "a host's link is cut": "a link is cut",
    "a node gets SIGTERM or Ctrl-C": "a node leaves",
    "a node joins": "a node joins",
    "one of three members of etcd is killed": '"Of one of three members the terminal shows nothing"',
    "etcd is gone and comes back": "etcd is away",
    "fewer nodes than the least number, then enough": "too few nodes",
    "a worker hangs": "a worker hangs",
    "ranks call different collectives": "ranks disagree",
    "every worker with the state is lost": "every state is lost",
    "a host of a sharded model's replica is killed": "a host of a replica is killed",
    "a script for torchrun loses a host": "a script for torchrun loses a host",
}
SHARDED = "a host of a sharded model's replica is killed"  # of two models, in the benchmark's own words


def _printed() -> dict[str, list[tuple[str, str]]]:
    page = (ROOT / "docs/guide/what-happens.md").read_text()
    table = page.split("| failure |")[1].split("\n\n")[0]
    return {
        fault: [(seconds, name + date) for seconds, name, date in TIME.findall(cell)]
        for fault, cell in ROW.findall(table)
        if TIME.search(cell)
    }


def test_every_fault_of_the_page_is_compared() -> None:
    assert _printed().keys() == {*FAULTS, SHARDED}


def test_every_fault_of_the_page_has_its_lines() -> None:
    page = ROOT / "docs/guide/what-happens.md"
    shown = {block.lines_of for block in blocks(page)} - {""}
    assert _printed().keys() == LINES.keys()
    said = {lines.strip('"') for lines in LINES.values() if lines.startswith('"')}
    assert all(sentence in page.read_text() for sentence in said)
    assert shown == {*LINES.values(), "the only node is stopped"} - {f'"{sentence}"' for sentence in said}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_time_is_the_median_of_its_result(fault: str) -> None:
    printed = _printed()[fault]
    assert len(printed) == len(FAULTS[fault])
    for (seconds, result), values in zip(printed, FAULTS[fault], strict=True):
        found = values(json.loads((RESULTS / f"{result}.json").read_text())["values"])
        digits = len(seconds.partition(".")[2])
        assert f"{statistics.median(found):.{digits}f}" == seconds


def _of_one_trial(kept: Any) -> list[float]:
    """Returns torchrun's values of which the result has one each."""
    found = defaultdict(list)
    for trial in kept["trials"]:
        if trial["system"] == "torchrun":
            for one in trial["measured"]:
                found[one["row"]].append(one["value_s"])
    for name in ("join_s", "kill_s"):
        found[name] = _restart("torchrun", name)(kept)
    return [values[0] for values in found.values() if len(values) == 1]


@pytest.mark.parametrize(
    ("page", "count"),
    [("README.md", 2), ("docs/guide/from-torchrun.md", 1), ("docs/guide/what-happens.md", 1)],
)
def test_a_time_of_one_trial_is_not_called_a_median(page: str, count: int) -> None:
    text = (ROOT / page).read_text()
    [result] = {name + date for name, date in RESULT.findall(text) if name == "faults"}
    alone = _of_one_trial(json.loads((RESULTS / f"{result}.json").read_text())["values"])
    found = [
        passage
        for passage in PASSAGE.split(text)
        if (result in passage or "(the same run)" in passage)
        and any(
            f"{value:.{len(digits)}f}" == f"{whole}.{digits}".rstrip(".")
            for whole, digits in SECONDS.findall(passage)
            for value in alone
        )
    ]
    assert len(found) == count
    assert [passage for passage in found if "one trial" not in passage] == []
