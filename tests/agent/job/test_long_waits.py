"""A job that waits long says for what, also once all steps are done and before the first one."""

from __future__ import annotations

import time

import pytest

from bagua_agent.job.membership_driver import TOLD_AFTER_S
from bagua_agent.leadership.reports import Elected
from bagua_agent.membership import events as ev
from bagua_contract.records import Generation, GenerationKind, Placement, Stage
from tests.agent.leadership.test_dead_leader import Agent

WORKER = "m.0"


def leader(kind: GenerationKind, *, closing: bool) -> Agent:
    """Of a job of one worker, on a node of its own."""
    agent = Agent()
    agent.sees_agent("m", 7)
    agent.sees_agent("me", 8)
    agent.sees_member(WORKER, Stage.WAITING if kind is GenerationKind.GATHERING else Stage.LOOP)
    placement = Placement(WORKER, "m", "host-m", 0, 0, 0, 0, "", 1, 1, True)
    agent.membership.advance(
        ev.DesiredChanged(now_s=1.0, min_nodes=1, max_nodes=1),
        ev.GenerationSeen(now_s=1.0, generation=Generation(1, 0, kind, (placement,), "")),
        *([ev.ClosingSeen(now_s=1.0, generation=1)] if closing else []),
    )
    agent.membership.take(Elected(1), 2.0)
    agent.told.clear()
    return agent


@pytest.mark.parametrize(
    ("kind", "closing", "words", "told"),
    [
        (
            GenerationKind.PLANNED,
            True,
            "closing",
            "closing: 1 of 1 workers have yet to end, as global rank 0 on host-m",
        ),
        (
            GenerationKind.GATHERING,
            False,
            "before the loop",
            "before the loop: 0 of 1 worker of generation 1 at the first step; awaiting global rank 0 on host-m",
        ),
    ],
)
def test_a_wait_that_lasts_is_told_once(kind: GenerationKind, closing: bool, words: str, told: str) -> None:
    agent = leader(kind, closing=closing)
    begun_s = time.monotonic()

    def passes(seconds: float) -> None:
        for due in agent.timers.take_due(begun_s + seconds):
            due(begun_s + seconds)

    passes(TOLD_AFTER_S[words] - 10.0)
    assert told not in agent.told
    passes(TOLD_AFTER_S[words] + 10.0)
    assert agent.told.count(told) == 1
