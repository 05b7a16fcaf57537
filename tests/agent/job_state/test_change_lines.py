"""One line for a change: held for its cost, announced when that takes long, never lost, and in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.base.timers import Timers
from bagua_agent.job_state.change_lines import HOLD_S, MOST_KEPT, ChangeLines, awaits_cost, hold
from bagua_agent.job_state.console import JobTerminal
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement

FAILOVER, PLANNED = GenerationKind.FAILOVER, GenerationKind.PLANNED
FAILED_STEP = {"failed_step": 0.3, "failover": 0.11}


def generation(
    number: int, *workers: str, kind: GenerationKind = FAILOVER, reason: str = "lost h2"
) -> Generation:
    """workers: as NODE:SLOT, each a member since generation 1, or NODE:SLOT:SINCE."""
    members = []
    for global_rank, worker in enumerate(workers):
        node, slot, *since = worker.split(":")
        members.append(
            Placement(
                f"{node}:{slot}", node, node, int(slot), global_rank, 0, 0, "", int(*since or "1"), 1, True
            )
        )
    return Generation(number, number - 1, kind, tuple(members), "nonce", reason)


BEFORE = generation(2, "h1:0", "h1:1", "h2:0")
AFTER = generation(3, "h1:0", "h1:1")
ANNOUNCED = "generation 3, now: 2 workers on 1 node (-h2); lost h2"
WHOLE = "generation 3 is in force from step 13: 2 workers on 1 node (-h2); lost h2"
COST = "; 0.41 s without steps: failed step 0.3 s, failover 0.11 s"


class Terminal:
    """Of the agent h1."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.timers = Timers()
        self.lines = ChangeLines(JobTerminal(self.said.append, "h1"), self.timers, "h1")

    @property
    def texts(self) -> list[str]:
        return [line.split("| ", 1)[1] for line in self.said]

    def enters(self, worker_id: str, number: int, lost_s: dict[str, float], now_s: float) -> None:
        entered = session_pb2.Entered(generation=number, step=10 + number, lost_s=lost_s)
        self.lines.entered(worker_id, entered, now_s)

    def wait_until(self, now_s: float) -> None:
        for due in self.timers.take_due(now_s):
            due(now_s)


@pytest.mark.parametrize(
    ("record", "agent_id", "within_s"),
    [
        (AFTER, "h1", HOLD_S),
        (replace(AFTER, kind=PLANNED), "h1", HOLD_S),
        (AFTER, "h2", 0.0),  # its workers are out, and nothing tells it the cost
        (replace(AFTER, members=()), "h1", 0.0),
        (replace(AFTER, kind=GenerationKind.GATHERING, base=0), "h1", 0.0),
        (replace(AFTER, kind=GenerationKind.RESTART, base=0), "h1", 0.0),
    ],
)
def test_a_line_waits_only_where_its_cost_will_be_known(
    record: Generation, agent_id: str, within_s: float
) -> None:
    held = hold(record, agent_id)
    assert held.within_s == within_s and held.reason


def test_a_change_is_one_line_with_cause_and_cost() -> None:
    terminal = Terminal()
    terminal.lines.formed(BEFORE, AFTER, 0.0)
    assert not terminal.said
    terminal.enters("h1:0", 3, FAILED_STEP, 0.4)
    terminal.enters("h1:1", 3, {"failover": 2.0}, 0.5)
    terminal.wait_until(100.0)
    terminal.lines.say_held()
    assert terminal.texts == [WHOLE + COST]


def test_a_change_that_takes_long_is_announced_and_said_whole_when_it_is_in_force() -> None:
    terminal = Terminal()
    terminal.lines.formed(BEFORE, AFTER, 0.0)
    terminal.wait_until(HOLD_S - 0.1)
    assert not terminal.said
    terminal.wait_until(HOLD_S)
    assert terminal.texts == [ANNOUNCED]
    terminal.enters("h1:1", 3, {"failover": 60.2, "failed_step": 0.004}, 60.0)
    assert terminal.texts == [ANNOUNCED, f"{WHOLE}; 60 s without steps: failover"]


def test_what_waits_is_said_when_the_agent_ends() -> None:
    terminal = Terminal()
    terminal.lines.formed(BEFORE, AFTER, 0.0)
    terminal.lines.say_held()
    terminal.lines.say_held()
    terminal.wait_until(100.0)
    assert terminal.texts == [ANNOUNCED]


def test_lines_come_in_the_order_of_generations() -> None:
    terminal = Terminal()
    terminal.lines.formed(BEFORE, AFTER, 0.0)
    after = generation(4, "h1:0", "h1:1", "h3:0:4", kind=PLANNED, reason="adds h3")
    terminal.lines.formed(AFTER, after, 0.1)
    terminal.enters("h1:0", 4, {"switch": 0.002}, 0.2)
    terminal.enters("h1:0", 3, FAILED_STEP, 0.3)  # of an older one, which is no news
    assert terminal.texts == [
        ANNOUNCED,
        "generation 4 is in force from step 14: 3 workers on 2 nodes (+h3); adds h3; less than 0.01 s without steps",
    ]


def test_a_line_that_does_not_wait_comes_after_those_that_do() -> None:
    terminal = Terminal()
    terminal.lines.formed(BEFORE, AFTER, 0.0)
    terminal.lines.formed(AFTER, generation(4, reason="too few"), 0.1)
    assert terminal.texts == [ANNOUNCED, "generation 4, now: no workers; too few"]
    terminal.enters("h1:0", 3, FAILED_STEP, 0.3)
    assert terminal.texts[2:] == [WHOLE + COST]


def test_the_cost_is_that_of_a_worker_that_trained_before() -> None:
    joins = generation(3, "h1:0", "h1:1:3")
    assert awaits_cost(joins, "h1", "h1:1")
    assert not awaits_cost(joins, "h1", "h1:0")
    assert not awaits_cost(generation(3, "h1:0:3", "h2:0"), "h1", "h1:0"), "the other one is not here"
    terminal = Terminal()
    terminal.lines.formed(BEFORE, joins, 0.0)
    terminal.enters("h1:1", 3, {}, 0.2)
    assert not terminal.said
    terminal.enters("h1:0", 3, FAILED_STEP, 0.3)
    assert terminal.said[0].endswith(COST) and len(terminal.said) == 1


@pytest.mark.parametrize("enters_at_s", [0.2, 60.0])
def test_a_worker_that_knows_no_cost_is_believed_after_a_while(enters_at_s: float) -> None:
    terminal = Terminal()
    terminal.lines.formed(BEFORE, generation(3, "h1:0", "h1:1:3"), 0.0)
    terminal.wait_until(enters_at_s)
    terminal.enters("h1:1", 3, {}, enters_at_s)
    terminal.wait_until(enters_at_s + HOLD_S)
    assert terminal.texts[-1].startswith("generation 3 is in force from step 13: 2 workers on 1 node")


def test_generations_that_are_never_in_force_are_said_and_forgotten() -> None:
    terminal = Terminal()
    for number in range(3, 103):
        terminal.lines.formed(BEFORE, replace(AFTER, number=number), 0.0)
    assert len(terminal.lines._changes) <= MOST_KEPT
    terminal.wait_until(HOLD_S)
    assert len(terminal.said) == 100


def test_words_of_a_worker_about_other_generations_hide_no_line() -> None:
    terminal = Terminal()
    terminal.lines.formed(BEFORE, AFTER, 0.0)
    terminal.enters("h1:0", 1 << 40, {"x" * 10_000: 1.0}, 0.1)
    terminal.enters("h1:0", 3, FAILED_STEP, 0.2)
    terminal.wait_until(HOLD_S)
    assert ANNOUNCED in terminal.texts and max(map(len, terminal.said)) < 5000
