"""The table of faults and points: every kind of fault at every named point of workers and agents.

Pure. Owns the names, the bounds, the reasons for cells that are not run, and how cells share jobs. How a process is
brought to a point and how a fault is made is fault_stage.py's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from bagua_agent.base import failpoints as agent_failpoints
from bagua_core.elastic import failpoints as worker_failpoints

HANG_NOTICE_S, HANG_RENEW_S, HANG_TIMEOUT_S = 1.0, 2.0, 4.0
LEASE_S = 3.0
ETCD_ELECTION_S = 2.0  # of its own leader; then the write that waited for the old one is tried elsewhere
# Two shared cores run three workers, four agents' starts and an etcd: what takes 0.1 s alone may take a second there.
SHARED_FACTOR = 2.0
SHARED_SLACK_S = 2.0


class Who(Enum):
    """The process at the point."""

    MEMBER = "member"
    NEWCOMER = "newcomer"
    LEADER = "leading agent"
    SUCCESSOR = "agent that sees the leader gone"


class Occasion(Enum):
    """What brings it there. FAILOVER and JOIN: of a worker, whose agent lives and starts the next one."""

    STEP = "in a step"
    EPOCH = "outside steps"
    FAILOVER = "a worker was lost"
    JOIN = "a worker comes in"
    NODE_LOST = "an agent was killed"
    LEADER_LOST = "the leader was killed"
    HANG = "a worker hangs"
    END = "training ends"


# How long the next step takes for the occasion's own sake: they strike together.
OCCASION_BOUND_S = {
    Occasion.STEP: 0.0,
    Occasion.EPOCH: 0.0,
    Occasion.FAILOVER: 0.25,
    Occasion.JOIN: 0.25,
    Occasion.NODE_LOST: 0.5,
    Occasion.LEADER_LOST: 0.5,
    Occasion.HANG: HANG_TIMEOUT_S + 2.0,  # stacks are saved for two seconds before it is killed
    Occasion.END: 0.0,
}
NODE_LOSSES = frozenset({Occasion.NODE_LOST, Occasion.LEADER_LOST})
# Until the leader has written something no worker takes another step.
STALLING = frozenset({Occasion.FAILOVER, Occasion.NODE_LOST, Occasion.LEADER_LOST, Occasion.HANG})


@dataclass(frozen=True, slots=True)
class Moment:
    """A process stands at `point`."""

    point: str
    who: Who
    occasion: Occasion

    @property
    def of_agent(self) -> bool:
        return self.who in (Who.LEADER, Who.SUCCESSOR)

    def __str__(self) -> str:
        return f"{self.point} ({self.who.value}, {self.occasion.value})"


def _moments(who: Who, occasion: Occasion, points: str) -> tuple[Moment, ...]:
    return tuple(Moment(point, who, occasion) for point in points.split())


MOMENTS = (
    *_moments(
        Who.MEMBER,
        Occasion.STEP,
        "step.begin reduction.before reduction.done commit.before commit.after ledger.before",
    ),
    *_moments(Who.MEMBER, Occasion.EPOCH, "outside.done"),
    *_moments(Who.MEMBER, Occasion.FAILOVER, "switch.before entry.built entry.exchanged"),
    *_moments(Who.MEMBER, Occasion.JOIN, "switch.before entry.built entry.exchanged heal.send"),
    *_moments(
        Who.NEWCOMER, Occasion.JOIN, "switch.before entry.built entry.exchanged heal.receive heal.swap"
    ),
    *_moments(Who.LEADER, Occasion.FAILOVER, "generation.before generation.after"),
    *_moments(Who.LEADER, Occasion.JOIN, "generation.before generation.after"),
    *_moments(Who.LEADER, Occasion.NODE_LOST, "agent-removal.before agent-removal.after"),
    *_moments(
        Who.SUCCESSOR,
        Occasion.LEADER_LOST,
        "leader-removal.before leader-removal.after election.before election.after",
    ),
    *_moments(Who.LEADER, Occasion.HANG, "hang-order.before hang-order.after"),
    *_moments(Who.MEMBER, Occasion.END, "finish.done"),
    *_moments(Who.LEADER, Occasion.END, "result.before result.after"),
)
# Replicas are struck in test_replica_membership.py: no job of this table has them.
POINTS = worker_failpoints.POINTS | (agent_failpoints.POINTS - agent_failpoints.REPLICA_POINTS)


@dataclass(frozen=True, slots=True)
class Row:
    """bound_s: from the fault to the next committed step, and between any two steps until all are back; of faults
    that promise no missed step, between two steps. restarts_a_node: what makes a cell slow."""

    name: str
    bound_s: float
    no_step_missed: bool = False
    restarts_a_node: bool = False


WORKER_KILLED = Row("worker killed", 0.25)
SCRIPT_RAISES = Row("script raises", 0.25)
AGENT_KILLED = Row("agent killed", 0.5, restarts_a_node=True)
HOST_CUT = Row("host cut off", 1.0)
HOST_FROZEN = Row("host frozen", 1.0)
LEADER_LOST = Row("leader lost", 0.5, restarts_a_node=True)
ETCD_MEMBER_KILLED = Row("etcd member killed", 0.0, no_step_missed=True)
ETCD_AWAY = Row("etcd away", 0.0, no_step_missed=True)
ETCD_WIPED = Row("etcd wiped", 0.0, no_step_missed=True)
SIGTERM = Row("SIGTERM", 0.0, no_step_missed=True, restarts_a_node=True)
WORKER_HANGS = Row("worker hangs", HANG_TIMEOUT_S + 2.0)
BELOW_MINIMUM = Row("below the minimum", 0.0, restarts_a_node=True)

ROWS = (
    WORKER_KILLED,
    SCRIPT_RAISES,
    AGENT_KILLED,
    HOST_CUT,
    HOST_FROZEN,
    LEADER_LOST,
    ETCD_MEMBER_KILLED,
    ETCD_AWAY,
    ETCD_WIPED,
    SIGTERM,
    WORKER_HANGS,
    BELOW_MINIMUM,
)


@dataclass(frozen=True, slots=True)
class Cell:
    row: Row
    moment: Moment

    @property
    def bound_s(self) -> float:
        promised_s = self.row.bound_s + OCCASION_BOUND_S[self.moment.occasion]
        if self.moment.of_agent and self.row in (HOST_CUT, HOST_FROZEN, LEADER_LOST):
            promised_s += LEASE_S  # there may be no process to confirm it
        if self.row is ETCD_MEMBER_KILLED and self.moment.occasion in STALLING:
            promised_s += ETCD_ELECTION_S
        return SHARED_FACTOR * promised_s + SHARED_SLACK_S

    @property
    def starts_a_node(self) -> bool:
        return self.row.restarts_a_node or self.moment.occasion in NODE_LOSSES

    @property
    def ends_the_job(self) -> bool:
        return self.moment.occasion is Occasion.END

    def __str__(self) -> str:
        return f"{self.row.name} @ {self.moment}"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Cells that mean nothing, and why."""

    rows: frozenset[Row]
    covers: Callable[[Moment], bool]
    reason: str


EXCLUSIONS = (
    Exclusion(
        frozenset({WORKER_KILLED, SCRIPT_RAISES, WORKER_HANGS}),
        lambda m: m.point.startswith("result."),
        "the result is written when every worker has ended: there is none left to be struck",
    ),
    Exclusion(
        frozenset({AGENT_KILLED}),
        lambda m: m.point == "result.after",
        "the result is written: the other agents read it and end by themselves, often before they can be killed",
    ),
    Exclusion(
        frozenset({WORKER_HANGS}),
        lambda m: m.point == "finish.done",
        "no process waits for a worker whose training is done: its script may take as long as it likes to save a model",
    ),
    Exclusion(
        frozenset({BELOW_MINIMUM}),
        lambda m: m.occasion is Occasion.JOIN and m.who is not Who.NEWCOMER and m.point != "heal.send",
        "at the minimum a lost worker and its successor are one change: what follows a loss shows it",
    ),
)


def why_not(row: Row, moment: Moment) -> str:
    """Empty if the cell is run."""
    return next((e.reason for e in EXCLUSIONS if row in e.rows and e.covers(moment)), "")


def cells_of(row: Row) -> list[Cell]:
    return [Cell(row, moment) for moment in MOMENTS if not why_not(row, moment)]


CELLS = tuple(cell for row in ROWS for cell in cells_of(row))


def in_jobs(cells: Iterable[Cell], least_jobs: int) -> list[list[Cell]]:
    """Cells that one job suffers in succession; the one at the job's end, of which a job has one, comes last."""
    going_on = [c for c in cells if not c.ends_the_job]
    last = [c for c in cells if c.ends_the_job]
    jobs = max(least_jobs, len(last))
    return [going_on[i::jobs] + last[i : i + 1] for i in range(jobs)]


def diagonal(seed: int) -> list[Cell]:
    """A few cells with every row, and every point once. Rows and points that cost a start of a node, or a hang, meet
    each other; what is left over meets rows that cost little."""
    choose = random.Random(seed)
    while True:
        found = _diagonal(choose)
        if not any(why_not(cell.row, cell.moment) for cell in found):
            return found


def _diagonal(choose: random.Random) -> list[Cell]:
    moments = [choose.choice([m for m in MOMENTS if m.point == point]) for point in sorted(POINTS)]
    choose.shuffle(moments)
    rows = list(ROWS)
    choose.shuffle(rows)
    # Sorted the same way, the costly ones stand beside each other.
    moments.sort(key=lambda m: (m.occasion is Occasion.HANG, m.occasion in NODE_LOSSES), reverse=True)
    rows.sort(key=lambda r: (r is WORKER_HANGS, r.restarts_a_node), reverse=True)
    cheap = [row for row in ROWS if not row.restarts_a_node and row not in (WORKER_HANGS, ETCD_AWAY)]
    rows += [choose.choice(cheap) for _ in moments[len(rows) :]]
    found = [Cell(row, moment) for row, moment in zip(rows, moments, strict=True)]
    choose.shuffle(found)
    return found
