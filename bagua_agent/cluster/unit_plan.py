"""Decides what a node's daemon does with its units, from its orders, its units and people's requests.

A unit is asked to leave only by an existing order list that does not name it, or by a submission that says stop: an
absent key ends nothing (invariant 4). A unit starts only in slots that no living unit has, whatever orders say
(invariant 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import OrderView, UnitState, UnitView
from bagua_agent.cluster.node_trouble import forgotten_at_s, start_again_at_s, why_left_out
from bagua_agent.cluster.slot_choice import choose


class Wish(Enum):
    """The wish for a job. OVER: it has an outcome, so its units end by themselves and none is started."""

    RUN = "run"
    STOP = "stop"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class OwnUnit:
    """A unit of this node as its daemon knows it.

    order: number of the order it was started for. asked_since_s, killed_since_s: since when; None: it was not.
    act_again_s: when to ask or kill again, for the last time failed; None: it did not.
    ended_s: when it ended, or could not be started (refused, with the reason). failures: in a row, up to now. nonce: of
    the submission that it was started for; empty: not known. started_s: when this daemon started or found it.
    is_starting: its start has not returned. watched_pid, gone_pid: its main process that is watched; that has ended,
    though the unit may not have.
    """

    job_id: str
    alive: bool
    slots: tuple[int, ...] = ()
    order: int = 0
    shutdown_timeout_s: float = 0.0
    asked_since_s: float | None = None
    killed_since_s: float | None = None
    act_again_s: float | None = None
    ended_s: float = 0.0
    exit_code: int = 0
    failures: int = 0
    refused: bool = False
    reason: str = ""
    nonce: str = ""
    started_s: float = 0.0
    is_starting: bool = False
    watched_pid: int | None = None
    gone_pid: int | None = None


@dataclass(frozen=True, slots=True)
class UnitSituation:
    """The situation on a node. slots: of the node. orders: None if they are not known. wishes: by job; none where the
    submission is not known. nonces: of submissions, by job."""

    slots: int
    orders: tuple[OrderView, ...] | None
    units: tuple[OwnUnit, ...] = ()
    wishes: Mapping[str, Wish] = field(default_factory=dict)
    nonces: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartUnit:
    job_id: str
    slots: tuple[int, ...]
    order: int


@dataclass(frozen=True, slots=True)
class AskUnitToLeave:
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class KillUnit:
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A plan for the units of a node. forgets: units that ended and need no record any more. report: for the scheduler.
    troubles: of the node. again_at_s: when to decide again without news."""

    starts: tuple[StartUnit, ...] = ()
    asks: tuple[AskUnitToLeave, ...] = ()
    kills: tuple[KillUnit, ...] = ()
    forgets: tuple[str, ...] = ()
    report: tuple[UnitView, ...] = ()
    troubles: tuple[str, ...] = ()
    again_at_s: float | None = None


def plan_units(situation: UnitSituation, now_s: float, policy: ClusterPolicy) -> UnitPlan:
    """Returns what the daemon should do now. Pure. Each unit is asked to leave, and is killed, only once, unless that
    failed."""
    known = _Known(situation, now_s, policy)
    forgets = [u.job_id for u in situation.units if known.is_forgotten(u)]
    units = {u.job_id: u for u in situation.units if u.job_id not in forgets}
    asks, kills, troubles = [], [], []
    times: list[float | None] = []
    for unit in units.values():
        if not unit.alive:
            times.append(known.next_at_s(unit))
            continue
        why = known.why_leave(unit)
        if unit.asked_since_s is None:
            if why:
                asks.append(AskUnitToLeave(unit.job_id, why))
            continue
        kill_at_s = unit.asked_since_s + unit.shutdown_timeout_s + policy.kill_grace_s
        again_s = unit.act_again_s
        is_due_again = again_s is not None and now_s >= again_s
        times += [kill_at_s, again_s]
        if unit.killed_since_s is not None:
            if is_due_again:
                kills.append(KillUnit(unit.job_id, "the last try failed"))
            if now_s >= unit.killed_since_s + policy.stuck_after_kill_s:
                places = ", ".join(str(s) for s in unit.slots)
                how = "was killed" if again_s is None else "can't be killed, as the daemon's log says,"
                troubles.append(f"job {unit.job_id} {how} and still has processes in slots {places}")
            times.append(unit.killed_since_s + policy.stuck_after_kill_s)
        elif now_s >= kill_at_s:
            waited = f"it was asked to leave {now_s - unit.asked_since_s:.0f} s ago and is still there"
            kills.append(KillUnit(unit.job_id, waited))
        elif is_due_again:
            asks.append(AskUnitToLeave(unit.job_id, "the last try failed"))
    starts, waits = _starts(known, units)
    return UnitPlan(
        starts=tuple(starts),
        asks=tuple(asks),
        kills=tuple(kills),
        forgets=tuple(forgets),
        report=_report(known, units, waits, {a.job_id for a in asks}),
        troubles=tuple(troubles),
        again_at_s=min((t for t in times if t is not None and t > now_s), default=None),
    )


class _Known:
    """The situation with what follows for one unit."""

    def __init__(self, situation: UnitSituation, now_s: float, policy: ClusterPolicy) -> None:
        self.situation, self.now_s, self.policy = situation, now_s, policy
        self.orders = {o.job_id: o for o in situation.orders or ()}

    def wish(self, job_id: str) -> Wish | None:
        return self.situation.wishes.get(job_id)

    def is_of_an_earlier_job(self, unit: OwnUnit) -> bool:
        """Tells whether the job that the unit was started for was removed and its name was submitted again."""
        return bool(unit.nonce) and self.situation.nonces.get(unit.job_id, unit.nonce) != unit.nonce

    def why_leave(self, unit: OwnUnit) -> str:
        """Returns why a living unit should go; empty: it may stay."""
        if self.is_of_an_earlier_job(unit):
            return "its job was removed, and another of its name was submitted"
        if self.wish(unit.job_id) is Wish.STOP:
            return "the job is to stop"
        if self.situation.orders is not None and unit.job_id not in self.orders:
            return "the node has other orders"
        return ""

    def why_left_out(self, unit: OwnUnit) -> str:
        return why_left_out(_as_ended(unit), self.policy)

    def is_forgotten(self, unit: OwnUnit) -> bool:
        if unit.alive:
            return False
        if self.is_of_an_earlier_job(unit):
            return True  # its failures are not the new job's
        if self.why_left_out(unit) and self.wish(unit.job_id) in (Wish.RUN, None):
            # without an order too: it is what keeps the scheduler from sending the job here again
            return self.now_s >= forgotten_at_s(unit.ended_s, self.policy)
        return self.situation.orders is not None and unit.job_id not in self.orders

    def next_at_s(self, unit: OwnUnit) -> float | None:
        """Returns when something follows for a unit that ended; None: nothing by itself."""
        if self.wish(unit.job_id) in (Wish.STOP, Wish.OVER):
            return None
        if self.why_left_out(unit):
            return forgotten_at_s(unit.ended_s, self.policy)
        if unit.job_id not in self.orders or self.wish(unit.job_id) is None:
            return None
        return start_again_at_s(unit.ended_s, unit.failures, self.policy)


def _starts(
    known: _Known, units: Mapping[str, OwnUnit]
) -> tuple[list[StartUnit], dict[str, tuple[UnitState, str]]]:
    """Returns the units to be started, and for the other orders that have no living unit why not."""
    taken = {s for u in units.values() if u.alive for s in u.slots}
    free = set(range(known.situation.slots)) - taken
    starts: list[StartUnit] = []
    waits: dict[str, tuple[UnitState, str]] = {}
    # older orders first: a later one must not take the slots that an earlier one waits for
    for order in sorted(known.orders.values(), key=lambda o: (o.number, o.job_id)):
        unit = units.get(order.job_id)
        if unit is not None and unit.alive:
            continue
        why = _why_not(known, order, unit)
        if why is not None:
            waits[order.job_id] = why
            continue
        slots = choose(free, order.slots)
        if slots is None:
            waits[order.job_id] = (UnitState.WAITING, f"waits for {order.slots} slots, {len(free)} are free")
            continue
        free -= set(slots)
        starts.append(StartUnit(order.job_id, slots, order.number))
    return starts, waits


def _why_not(known: _Known, order: OrderView, unit: OwnUnit | None) -> tuple[UnitState, str] | None:
    """Returns why no unit is started for this order, even if slots are free; None: one is."""
    wish = known.wish(order.job_id)
    if wish is None:
        return UnitState.WAITING, "its submission is not known here yet"
    if wish is not Wish.RUN:
        return UnitState.ENDED, "the job is to stop" if wish is Wish.STOP else "the job is over"
    if order.is_of_another(known.situation.nonces.get(order.job_id, order.nonce)):
        return UnitState.WAITING, "its order is of another submission of this name"
    if not 1 <= order.slots <= known.situation.slots:
        return UnitState.REFUSED, f"asks {order.slots} slots, the node has {known.situation.slots}"
    if unit is None:
        return None
    left_out = known.why_left_out(unit)
    if left_out:
        return _as_ended(unit).state, left_out
    again_s = start_again_at_s(unit.ended_s, unit.failures, known.policy)
    if again_s is not None and known.now_s < again_s:
        return UnitState.WAITING, f"is started again in {again_s - known.now_s:.0f} s: {unit.reason}"
    return None


def _report(
    known: _Known,
    units: Mapping[str, OwnUnit],
    waits: Mapping[str, tuple[UnitState, str]],
    asked: set[str],
) -> tuple[UnitView, ...]:
    views = []
    for job_id in sorted(units.keys() | known.orders.keys()):
        unit = units.get(job_id)
        if unit is not None and unit.alive:
            leaves = unit.asked_since_s is not None or job_id in asked
            state = UnitState.LEAVING if leaves else UnitState.RUNNING
            views.append(UnitView(job_id, state, unit.slots, unit.failures, 0, unit.reason, unit.order))
            continue
        ended = _as_ended(unit) if unit is not None else UnitView(job_id, UnitState.WAITING)
        if job_id not in known.orders:
            views.append(ended)
            continue
        state, reason = waits.get(job_id, (UnitState.WAITING, "is about to start"))
        # who is left out keeps its own reason: the scheduler says for itself how often it failed
        own = unit is not None and bool(known.why_left_out(unit))
        views.append(
            UnitView(
                job_id,
                state,
                (),
                ended.failures,
                ended.exit_code,
                ended.reason if own else reason,
                known.orders[job_id].number,
            )
        )
    return tuple(views)


def _as_ended(unit: OwnUnit) -> UnitView:
    state = UnitState.REFUSED if unit.refused else UnitState.ENDED
    return UnitView(unit.job_id, state, (), unit.failures, unit.exit_code, unit.reason, unit.order)
