"""The page as text for a terminal: within its size, plain, the verdict first."""

from __future__ import annotations

import pytest

from bagua_agent.base.plain_text import duration
from bagua_agent.dashboard.page_data import page_data
from bagua_agent.dashboard.terminal_text import screen, summary_line, whole
from bagua_agent.observation.series import JobSeries
from tests.agent.dashboard.test_page_data import FORMED, IN_FORCE
from tests.agent.observation.facts import NOW_S, agent, facts, worker


def page(slots: int = 1, name: str = "loss") -> dict[str, object]:
    series = JobSeries()
    for second in range(3):
        workers = [
            worker(
                0, step=10 + second, metrics={name: 0.5}, total_steps=100, spent_s={"step": 3.0, "start": 1.0}
            )
        ]
        seen = facts(NOW_S + second, agents=(agent(0, *workers * slots), agent(1)), events=(FORMED, IN_FORCE))
        series.take(seen)
    return page_data(seen, series, "")


def test_a_screen_begins_with_the_verdict_and_the_progress() -> None:
    lines = screen(page(), 200, 100)
    assert lines[0].startswith("job demo  generation 3")
    assert lines[1] == "[ok] The job trains with 2 workers on 2 nodes at 1 steps/s."
    assert "step 12 of 100 (12%)  1 steps/s  88 s left  mean loss 0.5" in lines
    assert "goodput 100.0%: steps 3.0 s, start 1.0 s" in lines
    assert any("generation 3 (failover), cost 1.5 s: 2 workers (-h2); lost h2" in line for line in lines)


def test_no_step_is_shown_where_no_worker_reports_one() -> None:
    """As of a job that has ended: its workers are gone."""
    series, seen = JobSeries(), facts(NOW_S, agents=(), events=(FORMED, IN_FORCE))
    series.take(seen)
    shown = page_data(seen, series, "")
    assert not any(line.startswith("step ") for line in screen(shown, 200, 100))
    assert "step 0" not in summary_line(shown)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (20, 5), (200, 8)])
def test_a_screen_fits_its_terminal(columns: int, lines: int) -> None:
    shown = screen(page(slots=50), columns, lines)
    assert len(shown) == lines and all(len(line) <= columns for line in shown)
    assert shown[-1].startswith("... ")


def test_without_a_terminal_nothing_is_left_out() -> None:
    lines = whole(page(slots=300))
    assert sum(line.startswith("0 ") or line.split()[:1] == ["0"] for line in lines) >= 300
    assert not any(line.startswith("... ") for line in lines)
    assert any("generation 3 (failover), cost 1.5 s" in line for line in lines)


def test_a_generation_of_a_time_that_no_calendar_has_is_shown() -> None:
    shown = page()
    shown["generations"][-1]["at"] = 1e20  # type: ignore[index]
    assert any(line.startswith("--:--:--  generation 3") for line in whole(shown))


def test_what_a_script_says_moves_no_cursor() -> None:
    assert "\x1b" not in "".join(
        [summary_line(page(name="\x1b[2J")), *screen(page(name="\x1b[2J"), 200, 100)]
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.85, "850 ms"),
        (3.21, "3.2 s"),
        (54.4, "54 s"),
        (720, "12 min"),
        (11_100, "3 h 5 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
