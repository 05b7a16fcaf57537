"""Lists the measured faults and their bounds: one row for each kind of loss that the design survives, and for
each that ends a job or starts it anew.

Pure. A fault of a host is measured twice where a host leads: on a host that does not lead and on the leader's, under
the same bound.

Bounds are of the time from the fault to the survivors' next committed step; those of etcd promise that no step
is missed. fault_trials.py injects the faults that a job survives, fault_endings.py the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """bound_s None: the promise is `promise` in words. step_gap: measured is the longest gap between two steps.
    of_host: the fault strikes one host."""

    name: str
    title: str
    promise: str
    bound_s: float | None = None
    step_gap: bool = False
    of_host: bool = True


WORKER_KILLED = Row("worker_killed", "worker killed", "0.25 s", 0.25)
SCRIPT_RAISES = Row("script_raises", "script raises, within the budget", "0.25 s", 0.25)
AGENT_KILLED = Row("agent_killed", "agent killed", "0.5 s", 0.5)
HOST_SILENT = Row("host_silent", "host silent", "1 s", 1.0)
ETCD_MEMBER = Row(
    "etcd_member", "one etcd member of three killed", "no step missed", step_gap=True, of_host=False
)
ETCD_AWAY = Row("etcd_away", "etcd wholly gone and back", "no step missed", step_gap=True, of_host=False)
SIGTERM = Row("sigterm", "SIGTERM on a node", "peers lose no step")
BELOW_MINIMUM = Row("below_minimum", "below the minimum and back", "resumes with the new node")
WORKER_HANGS = Row("worker_hangs", "worker hangs", "as configured")
SCRIPT_RAISES_BEYOND = Row(
    "script_raises_beyond", "script raises, beyond the budget", "the job ends with code 1"
)
RANKS_DISAGREE = Row(
    "ranks_disagree", "ranks call different collectives", "the job ends with code 1", of_host=False
)
STATE_LOST = Row(
    "state_lost",
    "every worker with the state lost",
    "goes on from its checkpoint",
    of_host=False,
)

ROWS = (
    WORKER_KILLED,
    SCRIPT_RAISES,
    AGENT_KILLED,
    HOST_SILENT,
    ETCD_MEMBER,
    ETCD_AWAY,
    SIGTERM,
    BELOW_MINIMUM,
    WORKER_HANGS,
    SCRIPT_RAISES_BEYOND,
    RANKS_DISAGREE,
    STATE_LOST,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One trial. steps_missed: steps that Bagua's workers report as failed; None where the system does not report it.
    of_leader: the host that was struck led the job."""

    row: str
    value_s: float
    steps_missed: int | None = None
    of_leader: bool = False


def verdict(row: Row, found: Sequence[Measured]) -> str:
    """Whether the promise was kept: by the medians of leaders' hosts and of others, but without a missed step in any
    trial."""
    if not found:
        return "-"
    if row.step_gap or row is SIGTERM:
        missed = sum(m.steps_missed or 0 for m in found)
        return "kept" if missed == 0 else f"NOT KEPT: {missed} steps missed"
    if row.bound_s is None:
        return "-"
    slow = [
        whose
        for whose, of_leader in (("another host", False), ("the leader's", True))
        if (values := [m.value_s for m in found if m.of_leader is of_leader])
        and statistics.median(values) > row.bound_s
    ]
    return f"NOT KEPT: {', '.join(slow)}" if slow else "kept"
