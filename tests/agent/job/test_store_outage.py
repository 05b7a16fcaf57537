"""What the terminal says while etcd is away: that steps go on, or that none follows and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from bagua_agent.job.store_outage import AWAY, STUCK, StoreOutage
from bagua_agent.job_state.context import JoinedJob

BACK = "etcd answers again"


class Terminal:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.outage = StoreOutage()
        self.job = cast(
            JoinedJob,
            SimpleNamespace(
                terminal=SimpleNamespace(tell=self.said.append),
                leased=SimpleNamespace(recheck=lambda: None),
            ),
        )

    def etcd(self, *, answers: bool) -> None:
        self.outage.changed(answers, 1.0, self.job, leading=False)

    def steps(self, *, wait: bool) -> None:
        self.outage.follow_steps(self.job, awaits_generation=wait)


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
