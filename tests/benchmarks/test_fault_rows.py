"""The table of faults, from trials made by hand."""

from __future__ import annotations

import pytest

from benchmarks.fault_endings import ENDINGS, Endings
from benchmarks.fault_restart_mode import StockTrial
from benchmarks.fault_rows import (
    AGENT_KILLED,
    ETCD_AWAY,
    ROWS,
    SIGTERM,
    WORKER_HANGS,
    WORKER_KILLED,
    Measured,
    Row,
    verdict,
)
from benchmarks.fault_trials import PLANS, Faults, Trial
from benchmarks.faults import in_words


def test_a_bound_is_kept_by_the_median() -> None:
    name = WORKER_KILLED.name
    assert verdict(WORKER_KILLED, [Measured(name, v) for v in (0.1, 0.2, 3.0)]) == "kept"
    assert verdict(WORKER_KILLED, [Measured(name, v) for v in (0.1, 0.3, 3.0)]) == "NOT KEPT: another host"
    assert verdict(WORKER_KILLED, []) == "-"
    assert verdict(WORKER_HANGS, [Measured(WORKER_HANGS.name, 6.0)]) == "-", "as configured"


def test_a_bound_holds_for_the_leaders_host_as_for_others() -> None:
    others = [Measured(AGENT_KILLED.name, v) for v in (0.2, 0.3, 0.3)]
    leaders = [Measured(AGENT_KILLED.name, v, of_leader=True) for v in (0.3, 3.2, 3.1)]
    assert verdict(AGENT_KILLED, [*others, *leaders]) == "NOT KEPT: the leader's", "not one median of all"
    assert verdict(AGENT_KILLED, [*others, *leaders[:1]]) == "kept"


@pytest.mark.parametrize("row", [ETCD_AWAY, SIGTERM])
def test_not_one_step_may_be_missed(row: Row) -> None:
    assert verdict(row, [Measured(row.name, 0.05, 0), Measured(row.name, 0.05, 0)]) == "kept"
    assert (
        verdict(row, [Measured(row.name, 0.05, 0), Measured(row.name, 0.05, 2)]) == "NOT KEPT: 2 steps missed"
    )


def test_every_row_is_measured_on_bagua_and_can_be_made() -> None:
    assert sorted(row.name for row in (*PLANS["bagua"], *ENDINGS)) == sorted(row.name for row in ROWS)
    assert all(callable(getattr(Faults, row.name)) for row in PLANS["bagua"])
    assert all(callable(getattr(Endings, row.name)) for row in ENDINGS)


def test_the_table_shows_rows_systems_and_notes() -> None:
    trials = [
        Trial(
            "bagua",
            [
                Measured("worker_killed", 0.1),
                Measured("worker_killed", 0.15, of_leader=True),
                Measured("etcd_away", 0.034, 0),
                Measured("state_lost", 1.25),
            ],
        ),
        Trial("torchrun", [Measured("worker_killed", 5.0)], ["the trial ended: nothing more came"]),
    ]
    stock = [StockTrial("bagua", 2.0, 1.5, 1.75), StockTrial("torchrun", note="restart mode not available")]
    words = in_words(trials, stock, ROWS)
    killed = next(line for line in words.splitlines() if line.startswith("| worker killed"))
    assert [cell.strip() for cell in killed.split("|")[1:-1]] == [
        "worker killed",
        "0.25 s",
        "0.10 s",
        "0.15 s",
        "5.00 s",
        "kept",
    ]
    away = next(line for line in words.splitlines() if "etcd wholly gone" in line)
    assert "0.034 s" in away and "kept" in away
    lost = next(line for line in words.splitlines() if "with the state lost" in line)
    assert "| goes on from its checkpoint | 1.25 s | - |" in " ".join(lost.split())
    assert "| bagua | 2.00 s | 1.50 s | 1.75 s |" in " ".join(words.split())
    assert "nothing more came (1 of the trials)" in words
    assert "restart mode, torchrun: restart mode not available" in words
