"""Decides whether the job hangs, for which members it waits, and what follows.

Pure: times are arguments, nothing is kept.

Considers the members of one generation: the newest in which a worker waits. A member is *inside* while it waits in a
collective, for a copy or for a communicator of that generation (its STALLED suspicion exists), else *outside*:
computing, reading data, saving a checkpoint, evaluating, or hung. Waiting is a fact that a member reports; being
outside is only the absence of such a report. Hence the rules:

    state of the members              for how long               outcome
    none inside                       any                        NOTHING: no evidence against any member
    an agent does not answer          any                        NOTHING: a loss; detection.py judges it
    some inside, some outside         notice_s                   NAME those outside
      and others have the state       hang_timeout_s             REPLACE them: kill, start again
      and they hold the only state    hang_timeout_s             NAME: killing them would end the job
      and most_replacements made      hang_timeout_s             GIVE_UP: the script hangs by itself
    all inside, connections cut       cut_s, doubling from the   RENEW at once; decision.py leaves a node out, if it
      (their transport says so)       third time on              does not help
    all inside                        renew_s, doubling each     RENEW: same members, new communicator
      and most_renewals made          time                       GIVE_UP: their collectives do not match
    all inside, in operations that    disagreement_s             DISAGREE: the job fails with what each waits in
      certainly differ; or of each
      replica at least one worker is

notice_s and renew_s are floors: where the usual step is long, usual_factor times that counts. A member that waited and
went on is outside since then and not since the others began to wait, so one that makes progress within a step is
never replaced; and "all inside" counts from the last one that came in. Times start anew with each generation and each
wait: a commit, or a member that goes on, ends the episode. A member at which bytes of the state keep arriving, in a
copy or from a checkpoint, reports a new wait again and again (bagua_core, member_waits.py): a long copy is not renewed.

"All inside" alone proves little: a large sum over a slow network causes the same reports. But if TCP has retransmitted
again and again without an acknowledgement, the wait can't be a slow checkpoint and will not end soon. A joiner that has
committed nothing yet reports no wait while it joins, so it is no evidence against a cut; else it counts like any other.

Every outcome except NOTHING and a cut saves all stacks first, before an agent kills or the leader writes a generation.
A slow checkpoint or evaluation on one rank is named, with its stack, and goes on: hang_timeout_s must outlast it.
Level-triggered: the same picture gives the same answer, so acting on it must be idempotent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from bagua_agent.base.backoff import delay_s
from bagua_agent.base.plain_text import some
from bagua_agent.membership.disagreement import MemberWait, difference

if TYPE_CHECKING:  # a command line is read without the contract
    from bagua_contract.collective_wait import CollectiveWait


MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The limits by which a hang is judged; policy.py explains the values. hang_timeout_s None: no worker is ever
    replaced and no job given up, only named and renewed."""

    usual_factor: float
    notice_s: float
    renew_s: float
    cut_s: float
    disagreement_s: float
    hang_timeout_s: float | None
    most_renewals: int
    most_replacements: int

    def __post_init__(self) -> None:
        for name in ("usual_factor", "notice_s", "renew_s", "cut_s", "disagreement_s", "hang_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be greater than 0, not {value}")


@dataclass(frozen=True, slots=True)
class MemberState:
    """A member of the generation, as far as it waits or is outside.

    waiting_since_s: None while it is outside. outside_since_s: when its last reported wait ended; None if it reported
    none in this generation. answers: its agent does, or was not asked yet. holder: it has the job's state. newcomer: it
    has committed nothing yet. cannot_reach: hosts that don't acknowledge what it sends. waits_in: the operation that it
    waits in; None if it reported none that can be compared. mate_waits: another worker of its replica waits; it may be
    held up by that one, in collectives of the replica, which are not reported.
    """

    worker_id: str
    global_rank: int
    node_name: str
    waiting_since_s: float | None = None
    outside_since_s: float | None = None
    answers: bool = True
    holder: bool = True
    newcomer: bool = False
    cannot_reach: tuple[str, ...] = ()
    waits_in: CollectiveWait | None = None
    mate_waits: bool = False


@dataclass(frozen=True, slots=True)
class HangSituation:
    """The picture that a hang is decided on. usual_step_s: None before the first steps. renewals, replacements: for
    hanging, since the last commit."""

    generation: int
    members: tuple[MemberState, ...]
    usual_step_s: float | None = None
    renewals: int = 0
    replacements: int = 0


class HangOutcome(Enum):
    NOTHING = "nothing"
    NAME = "name"
    RENEW = "renew"
    REPLACE = "replace"
    GIVE_UP = "give up"
    DISAGREE = "disagree"


@dataclass(frozen=True, slots=True)
class HangDecision:
    """The outcome that a situation calls for. workers: those concerned, the slowest first. wake_at_s: decide again then
    if nothing happens before. cut: the reason is a cut between hosts, which no stack shows."""

    outcome: HangOutcome
    reason: str
    workers: tuple[str, ...] = ()
    wake_at_s: float | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class HangOrder:
    """The order that the leader has written for all agents: to save their workers' stacks, and what it concerns.
    outcome REPLACE: the agents of `workers` then kill them. It stays in the store as long as it is true, so it can't be
    missed."""

    generation: int
    outcome: HangOutcome
    workers: tuple[str, ...]
    reason: str


def order_for(decision: HangDecision, generation: int, standing: HangOrder | None) -> HangOrder | None:
    """Returns the order that should be in the store now: `standing` itself if nothing new has to be done, None for no
    order."""
    if decision.outcome is HangOutcome.NOTHING or decision.cut:
        return None
    if standing is not None and (standing.generation, standing.outcome) == (generation, decision.outcome):
        concerned, listed = set(decision.workers), set(standing.workers)
        # One that came meanwhile is no reason to save all stacks again; but it must not be killed any more.
        if concerned == listed or (decision.outcome is HangOutcome.NAME and concerned < listed):
            return standing
    return HangOrder(generation, decision.outcome, decision.workers, decision.reason)


def decide_hang(situation: HangSituation, now_s: float, limits: HangLimits) -> HangDecision:
    """Decides what the picture calls for now, by the module's table."""
    waits = [m.waiting_since_s for m in situation.members if m.waiting_since_s is not None]
    if not waits:
        return HangDecision(HangOutcome.NOTHING, "no worker waits")
    silent = [m for m in situation.members if not m.answers]
    if silent:
        return HangDecision(HangOutcome.NOTHING, f"asking whether {silent[0].node_name} lives")
    outside = [m for m in situation.members if m.waiting_since_s is None]
    if not outside and not any(m.cannot_reach for m in situation.members):
        differs = _disagreement(situation, now_s - max(waits), now_s, limits)
        if differs is not None:
            return differs
        return _all_inside(situation, now_s - max(waits), now_s, limits)
    soon_s: float | None = None
    if outside and all(m.mate_waits for m in outside):
        inside = tuple(m for m in situation.members if m.waiting_since_s is not None)
        differs = _disagreement(replace(situation, members=inside), now_s - max(waits), now_s, limits)
        if differs is not None and differs.outcome is HangOutcome.DISAGREE:
            return differs
        soon_s = None if differs is None else differs.wake_at_s
    if any(m.cannot_reach for m in situation.members) and all(m.newcomer for m in outside):
        return _cut(situation, now_s - max(waits), now_s, limits)
    first_s = min(waits)
    late_s = {m.worker_id: now_s - max(first_s, m.outside_since_s or first_s) for m in outside}
    decision = _some_outside(situation, outside, late_s, now_s, limits)
    if soon_s is None:
        return decision
    return replace(decision, wake_at_s=min(soon_s, decision.wake_at_s or soon_s))


def wait_began_s(seen_at_s: float, waited_s: float) -> float:
    """Returns when a wait began, by the clock of the agent that learned of it at seen_at_s. A report that was delayed,
    or that a new leader reads only now, makes the wait appear younger, never older."""
    return seen_at_s - waited_s


def _some_outside(
    situation: HangSituation,
    outside: list[MemberState],
    late_s: dict[str, float],
    now_s: float,
    limits: HangLimits,
) -> HangDecision:
    notice_s = _floor(limits.notice_s, situation, limits)
    slowest_first = sorted(outside, key=lambda m: (-late_s[m.worker_id], m.global_rank))
    longest_s = late_s[slowest_first[0].worker_id]
    if longest_s < notice_s:
        return HangDecision(
            HangOutcome.NOTHING,
            _waited_for(slowest_first, late_s, situation),
            (),
            now_s + notice_s - longest_s,
        )
    named = [m for m in slowest_first if late_s[m.worker_id] >= notice_s]
    reason = _waited_for(named, late_s, situation)
    ids = tuple(m.worker_id for m in named)
    if limits.hang_timeout_s is None:
        return HangDecision(HangOutcome.NAME, reason, ids)
    timeout_s = max(limits.hang_timeout_s, notice_s)
    if longest_s < timeout_s:
        return HangDecision(HangOutcome.NAME, reason, ids, now_s + timeout_s - longest_s)
    hung = [m for m in named if late_s[m.worker_id] >= timeout_s]
    if not any(m.holder for m in situation.members if m not in hung):
        return HangDecision(
            HangOutcome.NAME, f"{reason}; not replaced, since no other worker has the job's state", ids
        )
    if situation.replacements >= limits.most_replacements:
        tried = f"{situation.replacements} replaced since the last commit"
        return HangDecision(HangOutcome.GIVE_UP, f"{reason}; {tried}, and it hangs again", ids)
    return HangDecision(HangOutcome.REPLACE, reason, tuple(m.worker_id for m in hung))


def _cut(situation: HangSituation, waited_s: float, now_s: float, limits: HangLimits) -> HangDecision:
    # The second time as soon as the first: then a node is left out. Later ones are trials whether it has ended.
    cut_s = delay_s(max(1, situation.renewals), limits.cut_s, max(limits.cut_s, limits.renew_s))
    pairs = [f"{m.node_name} gets no answer from {', '.join(m.cannot_reach)}" for m in _cut_off(situation)]
    reason = f"all wait and {some(pairs, MOST_NAMED, '; ')}"
    if waited_s < cut_s:
        return HangDecision(HangOutcome.NOTHING, reason, (), now_s + cut_s - waited_s)
    return HangDecision(HangOutcome.RENEW, reason, tuple(m.worker_id for m in _cut_off(situation)), cut=True)


def _cut_off(situation: HangSituation) -> list[MemberState]:
    """Returns one member of each node that can't reach a host, in rank order: a node's workers share the cable."""
    by_node = {m.node_name: m for m in reversed(situation.members) if m.cannot_reach}
    return sorted(by_node.values(), key=lambda m: m.global_rank)


def _all_inside(situation: HangSituation, waited_s: float, now_s: float, limits: HangLimits) -> HangDecision:
    # Doubling: if the step really takes that long, renewing at a fixed time would never let it end.
    renew_s = _floor(limits.renew_s, situation, limits) * 2.0 ** min(situation.renewals, 64)
    reason = (
        f"all {len(situation.members)} members wait in collectives for {waited_s:.0f} s{_usual(situation)}"
    )
    ids = tuple(m.worker_id for m in sorted(situation.members, key=lambda m: m.global_rank))
    if waited_s < renew_s:
        return HangDecision(HangOutcome.NOTHING, reason, (), now_s + renew_s - waited_s)
    if situation.renewals >= limits.most_renewals and limits.hang_timeout_s is not None:
        return HangDecision(
            HangOutcome.GIVE_UP,
            f"{reason}; {situation.renewals} new communicators changed nothing: do all ranks call the same ones?",
            ids,
        )
    return HangDecision(HangOutcome.RENEW, f"{reason}; a new communicator for the same members", ids)


def _disagreement(
    situation: HangSituation, waited_s: float, now_s: float, limits: HangLimits
) -> HangDecision | None:
    if any(m.newcomer for m in situation.members):
        return None  # it has not numbered what the others did before it came
    differs = difference(MemberWait(m.global_rank, m.waits_in) for m in situation.members)
    if differs is None:
        return None
    if waited_s < limits.disagreement_s:
        return HangDecision(HangOutcome.NOTHING, differs, (), now_s + limits.disagreement_s - waited_s)
    ids = tuple(m.worker_id for m in sorted(situation.members, key=lambda m: m.global_rank))
    return HangDecision(HangOutcome.DISAGREE, differs, ids)


def _floor(least_s: float, situation: HangSituation, limits: HangLimits) -> float:
    return max(least_s, limits.usual_factor * (situation.usual_step_s or 0.0))


def _waited_for(slow: list[MemberState], late_s: dict[str, float], situation: HangSituation) -> str:
    waiting = sum(1 for m in situation.members if m.waiting_since_s is not None)
    awaited = some((f"global rank {m.global_rank} on {m.node_name}" for m in slow), MOST_NAMED)
    return (
        f"{waiting} of {len(situation.members)} wait for {awaited}: {late_s[slow[0].worker_id]:.0f} s outside the "
        f"step's collectives{_usual(situation)}"
    )


def _usual(situation: HangSituation) -> str:
    return "" if situation.usual_step_s is None else f" (a step usually takes {situation.usual_step_s:.2g} s)"
