"""The plot of a job's generations: what it takes from the events, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.history.job_history import EventKind, JobEvent
from bagua_launch.events_plot import Change, cause_line, changes_of, plot_events


def formed(number: int, at_s: float, size: int, kind: str = "PLANNED") -> JobEvent:
    text = f"generation {number}, now: {size} workers on 1 node; because {number}"
    return JobEvent(f"generation-{number}", EventKind.GENERATION_FORMED, text, "h1", at_s, number, kind, size)


def in_force(number: int, at_s: float, lost_s: float) -> JobEvent:
    text = f"generation {number} is in force"
    return JobEvent(
        f"in-force-{number}", EventKind.GENERATION_IN_FORCE, text, "h2", at_s, number, lost_s=lost_s
    )


EVENTS = [
    JobEvent("created", EventKind.JOB_CREATED, "job created", "h1", 100.0),
    formed(1, 102.0, 2, "GATHERING"),
    formed(2, 103.0, 2),
    in_force(2, 104.0, 0.5),
    formed(3, 110.0, 1, "FAILOVER"),
    in_force(3, 103.5, 0.12),  # by a clock that is behind
    JobEvent("unwritten", EventKind.NODE_LOST, "lost", "h1", 0.0),
    JobEvent("ended", EventKind.JOB_ENDED, "job succeeded", "h1", 120.0),
]


def test_a_change_has_its_time_size_cause_and_cost() -> None:
    changes, end_s = changes_of(EVENTS)
    assert end_s == 20.0
    assert [(c.number, c.kind, c.at_s, c.world_size, c.lost_s) for c in changes] == [
        (1, "GATHERING", 2.0, 2, None),
        (2, "PLANNED", 4.0, 2, 0.5),
        (3, "FAILOVER", 4.0, 1, 0.12),
    ]
    assert cause_line(changes[2], changes[1]) == (
        "3  at 4.0 s, failover, 2 → 1: 0.12 s lost; 1 workers on 1 node; because 3"
    )


def test_a_long_cause_is_cut() -> None:
    line = cause_line(Change(1, "PLANNED", 0.0, 2, "x" * 500, None), None)
    assert len(line) == 125 and line.endswith("…")


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot_is_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out{suffix}"
    plot_events("demo", EVENTS, path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_what_can_not_be_drawn_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="job 'demo' has had no generation yet"):
        plot_events("demo", EVENTS[:1], tmp_path / "out.svg")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(UserError, match=r"pip install 'bagua-elastic\[plot\]'"):
            plot_events("demo", EVENTS, tmp_path / "out.svg")
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "out.odd", tmp_path / "nowhere" / "out.svg"):
        with pytest.raises(UserError, match="can't write the plot"):
            plot_events("demo", EVENTS, path)
