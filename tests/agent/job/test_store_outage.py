"""What the terminal says while etcd is away: that steps go on, or that none follows and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from bagua_agent.base.timers import Timers
from bagua_agent.job.store_outage import (
    AWAY,
    KEYS_AWAY_AFTER_S,
    KEYS_BACK,
    STUCK,
    StoreOutage,
    keeping_ended,
    keys_away,
)
from bagua_agent.job_state.context import JoinedJob

BACK = "etcd answers again"


class Terminal:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.timers = Timers()
        self.outage = StoreOutage()
        self.job = cast(
            JoinedJob,
            SimpleNamespace(
                terminal=SimpleNamespace(tell=self.said.append),
                leased=SimpleNamespace(recheck=lambda: None),
                timers=self.timers,
            ),
        )

    def etcd(self, *, answers: bool) -> None:
        self.outage.changed(answers, 1.0, self.job, leading=False)

    def steps(self, *, wait: bool) -> None:
        self.outage.follow_steps(self.job, awaits_generation=wait)

    def pass_time(self, until_s: float) -> None:
        for due in self.timers.take_due(until_s):
            due(until_s)


def test_an_outage_without_a_loss_stops_no_step() -> None:
    terminal = Terminal()
    terminal.etcd(answers=False)
    terminal.steps(wait=False)
    terminal.etcd(answers=True)
    assert terminal.said == [AWAY, BACK]


def test_a_loss_during_an_outage_is_told_once() -> None:
    terminal = Terminal()
    terminal.etcd(answers=False)
    for _ in range(3):
        terminal.steps(wait=True)
    assert terminal.said == [AWAY, STUCK]
    terminal.etcd(answers=True)
    terminal.steps(wait=True)
    assert terminal.said == [AWAY, STUCK, BACK], "with etcd a loss is an ordinary one"


def test_an_outage_that_comes_with_a_loss_never_says_that_steps_go_on() -> None:
    """A node that hosts etcd is lost: both go in the same moment, in either order."""
    terminal = Terminal()
    terminal.steps(wait=True)
    assert terminal.said == []
    terminal.etcd(answers=False)
    terminal.steps(wait=True)
    assert terminal.said == [STUCK]


def test_the_next_outage_is_told_anew() -> None:
    terminal = Terminal()
    for _ in range(2):
        terminal.etcd(answers=False)
        terminal.steps(wait=True)
        terminal.etcd(answers=True)
        terminal.steps(wait=False)
    assert terminal.said == [AWAY, STUCK, BACK] * 2


def test_keys_that_etcd_does_not_take_are_told_of_while_its_changes_arrive() -> None:
    terminal = Terminal()
    terminal.outage.keys_away("no answer within 15 s", 1.0, terminal.job)
    terminal.pass_time(1.0 + KEYS_AWAY_AFTER_S / 2)
    assert terminal.said == [], "another endpoint of etcd may take them"
    terminal.pass_time(1.0 + KEYS_AWAY_AFTER_S)
    assert terminal.said == [keys_away("no answer within 15 s")]
    assert terminal.said[0].startswith("etcd does not take this node's keys")
    terminal.outage.keys_back(terminal.job)
    assert terminal.said == [keys_away("no answer within 15 s"), KEYS_BACK]


def test_keys_that_etcd_takes_soon_are_not_told_of() -> None:
    terminal = Terminal()
    terminal.outage.keys_away("no answer within 15 s", 1.0, terminal.job)
    terminal.outage.keys_back(terminal.job)
    terminal.pass_time(1000.0)
    assert terminal.said == []


def test_keys_that_nothing_tries_to_keep_are_told_of_at_once() -> None:
    terminal = Terminal()
    terminal.outage.keys_away("no answer within 15 s", 1.0, terminal.job)
    terminal.outage.keeping_ended("SystemExit: 3", terminal.job)
    terminal.pass_time(1000.0)
    assert terminal.said == [keeping_ended("SystemExit: 3")]
    assert "tried again" not in terminal.said[0] and "start it again" in terminal.said[0]


def test_keys_in_an_outage_are_told_of_only_if_they_outlast_it() -> None:
    terminal = Terminal()
    terminal.etcd(answers=False)
    terminal.outage.keys_away("no answer within 15 s", 1.0, terminal.job)
    terminal.pass_time(100.0)
    assert terminal.said == [AWAY]
    terminal.etcd(answers=True)
    terminal.pass_time(100.0 + KEYS_AWAY_AFTER_S)
    assert terminal.said == [AWAY, BACK, keys_away("no answer within 15 s")]
