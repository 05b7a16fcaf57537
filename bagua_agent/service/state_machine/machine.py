"""Decides what a node's daemon does after each event: with its units, and with the records that etcd has lost.

Pure: no IO and no clock. What happens to units once all events are taken: cluster/unit_plan.py. An action that fails
comes back as an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from bagua_agent.base.plain_text import plain_line, shortened
from bagua_agent.cluster.cluster_records import (
    UnreadableRecord,
    ended_submission,
    nonce_of,
    parse_submission,
    read_orders,
    read_removal,
    write_removal,
)
from bagua_agent.cluster.cluster_view import RemovalView
from bagua_agent.cluster.node_trouble import failures_after
from bagua_agent.cluster.retention import is_worth_putting_back
from bagua_agent.cluster.unit_plan import OwnUnit, UnitSituation, Wish, plan_units
from bagua_agent.cluster.unit_plan import StartUnit as PlannedStart
from bagua_agent.config.job_config import SHUTDOWN_TIMEOUT_S
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.mirror import Change
from bagua_agent.service.state_machine import messages as ms
from bagua_agent.service.state_machine.state import Now, State
from bagua_agent.service.units.units import FoundUnit
from bagua_contract import cluster_pb2 as pb

T = TypeVar("T")

TRY_AGAIN_S = 1.0
ACT_AGAIN_S = 10.0  # on a unit, after that failed
LOOK_EVERY_S = 60.0  # at the node itself
LOOK_AGAIN_S = 5.0  # once it looks otherwise than before
# A program that is asked has a quarter of it, and a file server that fails over may take so long.
LOOK_ENDS_S = 120.0
LOOK_HANGS = (
    "node: a disk or the GPU driver does not answer; processes in state D show which (ps -eo pid,stat,wchan:32,args), "
    "and if they stay, reboot it"
)
LOOK_SOON_S = 0.2  # a living unit has no process yet, or none any more, so its end is not reported


def step(state: State, event: ms.Event, now: Now) -> tuple[State, tuple[ms.Action, ...]]:
    """Returns the daemon's next state after `event`, and its actions. Raises UnreadableRecord for a record that can't
    be read."""
    turn = _Turn(state, now)
    turn.take(event)
    return turn.state, tuple(turn.actions)


class _Turn:
    """Carries out one step. state: so far."""

    def __init__(self, state: State, now: Now) -> None:
        self.state = state
        self.now, self.now_s = now, now.monotonic_s
        self.actions: list[ms.Action] = []

    def take(self, event: ms.Event) -> None:
        match event:
            case ms.RecordChanged(change):
                self._take_change(change)
            case ms.UnitKept():
                self._take_kept(event)
            case ms.UnitsSeen():
                self._take_units(event)
            case ms.ProcessEnded(job_id):
                if (unit := self.state.units.get(job_id)) is not None and unit.watched_pid is not None:
                    self._set(replace(unit, gone_pid=unit.watched_pid))
                self._do(ms.LookForUnits())
            case ms.WatchFailed(job_id, pid, reason):
                self._say(f"job {job_id}: its process {pid} can't be watched yet: {reason}")
                if (unit := self.state.units.get(job_id)) is not None and unit.watched_pid == pid:
                    self._set(replace(unit, watched_pid=None))
                self._know(look_due_s=self.now_s + TRY_AGAIN_S)
            case ms.Started():
                self._take_started(event)
            case ms.StartRefused(job_id, reason):
                # it becomes part of this node's record, which etcd has to take
                reason = shortened(plain_line(reason))
                self._say(f"job {job_id} is refused here: {reason}")
                before = self.state.units.get(job_id)
                failures, nonce = (before.failures, before.nonce) if before is not None else (0, "")
                ended = OwnUnit(job_id, False, ended_s=self.now_s, failures=failures, nonce=nonce)
                self._set(replace(ended, refused=True, reason=reason))
                self._tell_failure(job_id, 0, reason)
            case ms.NodeSeen(troubles, notes):
                self._look_ended()
                for note in notes:
                    if note not in self.state.notes:
                        self._say(note)
                self._know(notes=notes)
                self._take_troubles(troubles)
            case ms.LookFailed(reason):
                self._look_ended()
                self._say(f"looking at the node failed: {reason}")
            case ms.Noted(text):
                self._know(note=text)
            case ms.StandsAgain(put, was_put):
                # else it is to be put over a newer value by now, and that answer follows
                if self.state.to_put_back.get(put.key) == put:
                    self._know(to_put_back=_without(self.state.to_put_back, put.key))
                if was_put:
                    what = "held an earlier" if put.over_revision else "has lost"
                    self._say(f"etcd {what} {put.key}; it is put back as this node remembers it")
            case ms.ActFailed():
                self._take_act_failed(event)
            case ms.NotDone(reason):
                self._say(reason)
                self._know(look_due_s=self.now_s + TRY_AGAIN_S)
            case ms.InboxDrained():
                self._follow()

    def _know(self, **fields: object) -> None:
        self.state = replace(self.state, **fields)  # type: ignore[arg-type]

    def _set(self, unit: OwnUnit) -> None:
        self._know(units={**self.state.units, unit.job_id: unit})

    def _do(self, *actions: ms.Action) -> None:
        self.actions.extend(actions)

    def _say(self, line: str) -> None:
        self._do(ms.Say(line))

    # -- records

    def _take_change(self, change: Change) -> None:
        key, value, state = change.key, change.value, self.state
        if key == cluster_keys.node(state.node_name):
            if value is None:  # an outage outlived the lease, or a person removed it
                self._say(
                    "etcd has lost this node's key; without it the node counts as lost, so it is put back"
                )
                self._do(ms.RecheckNodeKey())
        elif key == cluster_keys.orders(state.node_name):
            if value is not None:
                self._take_orders(value, change)
            elif state.orders_value is not None and not self._put_back(key, state.orders_value):
                self._know(orders=None, orders_value=None)
        elif (job_id := cluster_keys.id_in(cluster_keys.SUBMISSIONS, key)) is not None:
            if value is not None:
                self._take_submission(parse_submission(value, job_id), change)
            elif (known := state.submissions.get(job_id)) is not None and not self._put_back(
                key, known.SerializeToString(), nonce_of(known)
            ):
                self._know(submissions=_without(state.submissions, job_id))
        elif (job_id := cluster_keys.id_in(cluster_keys.OUTCOMES, key)) is not None:
            if value is not None:
                self._know(outcomes={**state.outcomes, job_id: value})
            elif (outcome := state.outcomes.get(job_id)) is not None and not self._put_back(
                key, outcome, ended_submission(outcome) or self._nonce(job_id)
            ):
                self._know(outcomes=_without(state.outcomes, job_id))
        elif (nonce := cluster_keys.id_in(cluster_keys.REMOVALS, key)) is not None:
            if value is not None:
                self._take_removal(nonce, read_removal(value))
            elif (removal := state.removals.get(nonce)) is not None:
                lost = is_worth_putting_back(removal, self.now.unix_s, state.policy)
                if not (lost and self._put_back(key, write_removal(removal))):
                    self._know(removals=_without(state.removals, nonce))
        elif value is not None:
            raise UnreadableRecord("no job can have this name")

    def _take_orders(self, value: bytes, change: Change) -> None:
        """Takes this node's orders, unless they were written before those that are known: then etcd was set back to a
        backup, or lost its keys and got others before this node heard of it. A job that was ordered since would end on
        all of its nodes.

        So the known orders are put back. The scheduler decides on them anew, and what it writes then is followed.
        """
        orders, known = read_orders(value), self.state.orders_value
        if known is None or value == known or change.mod_revision > self.state.orders_revision:
            self._know(orders=orders, orders_value=value, orders_revision=change.mod_revision)
        elif not self._put_back(change.key, known, over_revision=change.mod_revision):
            self._know(orders=None, orders_value=None)

    def _take_submission(self, submission: pb.Submission, change: Change) -> None:
        """Takes a submission, unless etcd was set back and holds it as it was before a command changed it, or holds
        the one of a removed job in its place."""
        job_id, nonce, removals = submission.job_id, nonce_of(submission), self.state.removals
        known = self.state.submissions.get(job_id)
        if known is not None:
            is_same = nonce_of(known) == nonce
            is_earlier = submission.changes < known.changes if is_same else nonce in removals
            record = known.SerializeToString()
            if is_earlier and self._put_back(change.key, record, nonce_of(known), change.mod_revision):
                return
        if nonce not in removals:  # else another daemon put it back, not knowing
            self._know(submissions={**self.state.submissions, job_id: submission})

    def _nonce(self, job_id: str) -> str:
        """Returns the nonce of the job's submission; empty if no submission is known."""
        submission = self.state.submissions.get(job_id)
        return "" if submission is None else nonce_of(submission)

    def _take_removal(self, nonce: str, removal: RemovalView) -> None:
        """Forgets the job, whatever was heard first: that it was removed, or that its keys are gone."""
        job_id, state = removal.job_id, self.state
        kept = {key: lost for key, lost in state.to_put_back.items() if lost.nonce != nonce}
        self._know(removals={**state.removals, nonce: removal}, to_put_back=kept)
        outcome = state.outcomes.get(job_id)
        if outcome is not None and (ended_submission(outcome) or self._nonce(job_id)) == nonce:
            self._know(outcomes=_without(state.outcomes, job_id))
        if self._nonce(job_id) == nonce:
            self._know(submissions=_without(state.submissions, job_id))
        unit = state.units.get(job_id)
        if unit is not None and not unit.alive and unit.nonce == nonce:
            self._forget(job_id)
        self._do(ms.RemoveLogs(job_id, nonce))

    def _put_back(self, key: str, value: bytes, nonce: str = "", over_revision: int = 0) -> bool:
        """Puts back what the store has lost, or holds as of earlier (invariant 4), unless it was removed with its job.
        nonce, over_revision: as of PutBack. Returns False if the value is to be forgotten."""
        if nonce in self.state.removals:
            return False
        if not self.now.may_put_back:
            what = "is as it was earlier" if over_revision else "is gone"
            self._say(f"{key} {what}; this node was out of touch for so long that it does not put it back")
            return False
        put = ms.PutBack(key, value, nonce, over_revision)
        self._know(to_put_back={**self.state.to_put_back, key: put})
        self._do(put)
        return True

    # -- units

    def _take_kept(self, event: ms.UnitKept) -> None:
        """Takes a unit of an earlier daemon. One that has ended counts as alive until UnitsSeen, which comes once
        records are known: its failure is counted and told as that of any other."""
        found, note = event.found, event.note
        # as far as the clock tells; of one that has ended, at most this long
        ran_s = max(0.0, self.now.unix_s - note.started_unix_s) if note.started_unix_s > 0 else 0.0
        unit = OwnUnit(
            found.job_id,
            True,
            slots=note.slots,
            order=note.order,
            shutdown_timeout_s=note.shutdown_timeout_s,
            # A second SIGTERM would end an agent of an earlier version at once, instead of at a step boundary.
            asked_since_s=self.now_s if event.was_asked else None,
            failures=note.failures,
            nonce=note.nonce,
            started_s=self.now_s - ran_s,
        )
        self._set(unit)
        if found.is_alive:
            self._say(f"job {found.job_id} runs here already, in slots {_text(note.slots)}")
            self._watch_over(unit, found)

    def _watch_over(self, unit: OwnUnit, found: FoundUnit) -> None:
        if found.pid in (0, unit.gone_pid):
            self._know(look_due_s=self.now_s + LOOK_SOON_S)
        elif unit.watched_pid != found.pid:
            self._set(replace(unit, watched_pid=found.pid))
            self._do(ms.WatchProcess(found.job_id, found.pid))

    def _take_started(self, event: ms.Started) -> None:
        if event.trouble:
            self._say(event.trouble)
        unit = self.state.units.get(event.job_id)
        if unit is not None:
            # with a trouble its end, which is seen next, has no other reason
            reason = shortened(plain_line(event.trouble)) if event.trouble else unit.reason
            given_s = event.shutdown_timeout_s
            timeout_s = unit.shutdown_timeout_s if given_s is None else given_s
            self._set(replace(unit, is_starting=False, reason=reason, shutdown_timeout_s=timeout_s))
        self._do(ms.LookForUnits())

    def _take_units(self, event: ms.UnitsSeen) -> None:
        there = {u.job_id: u for u in event.units}
        for job_id, unit in self.state.units.items():
            found = there.get(job_id)
            if found is not None and found.is_alive:
                if unit.reason:  # it was started after all, only not confirmed in time
                    unit = replace(unit, reason="")
                    self._set(unit)
                self._watch_over(unit, found)
            elif unit.alive and not unit.is_starting:
                code = found.exit_code if found is not None and found.exit_code is not None else 128 + 9
                self._ended(unit, code, event.reasons.get(job_id, ""))

    def _take_act_failed(self, event: ms.ActFailed) -> None:
        """Takes the failure of an act on a unit, and plans to repeat the act. A request to leave that may have come is
        not repeated: a second SIGTERM would end an agent of an earlier version at once, instead of at a step boundary.
        A kill may always be repeated."""
        self._say(event.reason)
        self._know(look_due_s=self.now_s + TRY_AGAIN_S)
        unit = self.state.units.get(event.job_id)
        asks = event.act is ms.UnitAct.ASK_TO_LEAVE and not event.may_be_done
        if unit is not None and unit.alive and (asks or event.act is ms.UnitAct.KILL):
            self._set(replace(unit, act_again_s=self.now_s + ACT_AGAIN_S))

    def _ended(self, unit: OwnUnit, code: int, why: str) -> None:
        """Records that a unit ended with `code`, and reports it. why: the error that ended its agent, if the agent
        could report it."""
        asked = unit.asked_since_s is not None or code == 0
        reason = unit.reason or f"its agent ended with {code}"
        if not unit.reason and why:
            reason += f": {plain_line(why)}"
        self._say(f"job {unit.job_id}: {reason}")
        failures = failures_after(unit.failures, self.now_s - unit.started_s, asked, self.state.policy)
        ended = OwnUnit(
            unit.job_id, False, order=unit.order, exit_code=code, failures=failures, nonce=unit.nonce
        )
        timeout_s = unit.shutdown_timeout_s
        self._set(replace(ended, ended_s=self.now_s, reason=reason, shutdown_timeout_s=timeout_s))
        self._do(ms.ActOnUnit(unit.job_id, ms.UnitAct.FORGET))
        if not asked:
            self._tell_failure(unit.job_id, failures, reason)

    def _tell_failure(self, job_id: str, failures: int, reason: str) -> None:
        """Writes the failure among the job's events, where people look when its agent never came to write one."""
        if (submission := self.state.submissions.get(job_id)) is not None:
            self._do(ms.TellFailure(submission, failures, reason))

    def _take_troubles(self, troubles: tuple[str, ...]) -> None:
        """Takes the troubles that a look found. They count once two looks in a row agree: one that comes and goes must
        not move jobs about."""
        if troubles == self.state.troubles_seen and troubles != self.state.troubles:
            self._say(f"in trouble: {'; '.join(troubles)}" if troubles else "in trouble no more")
            self._know(troubles=troubles)
        again_s = LOOK_EVERY_S if troubles == self.state.troubles else LOOK_AGAIN_S
        self._know(troubles_seen=troubles, looks_at_s=self.now_s + again_s)

    def _look_at_node(self) -> None:
        """Begins a look at the node if none is under way: each look that hangs would keep a thread and a process."""
        since_s = self.state.look_since_s
        self._know(looks_at_s=self.now_s + LOOK_EVERY_S)
        if since_s is None:
            self._know(look_since_s=self.now_s)
            self._do(ms.LookAtNode())
        elif not self.state.look_hangs and self.now_s >= since_s + LOOK_ENDS_S:
            self._know(look_hangs=True)
            self._say(f"in trouble: {LOOK_HANGS}")

    def _look_ended(self) -> None:
        if self.state.look_hangs:
            self._say("the look at the node that hung has ended")
        self._know(look_since_s=None, look_hangs=False)

    def _forget(self, job_id: str) -> None:
        self._know(units=_without(self.state.units, job_id))
        self._do(ms.ActOnUnit(job_id, ms.UnitAct.REMOVE))

    # -- following

    def _follow(self) -> None:
        """Does what the plan requires, and reports the units to the cluster."""
        if self.now_s >= self.state.looks_at_s:
            self._look_at_node()
        if self.state.look_due_s is not None and self.now_s >= self.state.look_due_s:
            self._know(look_due_s=None)
            self._do(ms.LookForUnits())
            self._do(*self.state.to_put_back.values())
        if self.state.logs_due_s is None or self.now_s >= self.state.logs_due_s:
            # Not at the start: by the first time records were read, and what etcd had lost was put back. Not out of
            # touch: a job that was removed meanwhile would count as known.
            if self.state.logs_due_s is not None and self.now.in_touch:
                self._do(ms.TidyLogs(self._known_submissions()))
            self._know(logs_due_s=self.now_s + self.state.policy.logs_tidied_every_s)
        made = plan_units(self._situation(), self.now_s, self.state.policy)
        for job_id in made.forgets:
            self._forget(job_id)
        for start in made.starts:
            self._start(start)
        for ask in made.asks:
            self._say(f"job {ask.job_id} is asked to leave: {ask.reason}")
            unit = self.state.units[ask.job_id]
            since_s = self.now_s if unit.asked_since_s is None else unit.asked_since_s
            self._set(replace(unit, asked_since_s=since_s, act_again_s=None))
            self._do(ms.ActOnUnit(ask.job_id, ms.UnitAct.ASK_TO_LEAVE))
        for kill in made.kills:
            self._say(f"job {kill.job_id} is killed: {kill.reason}")
            unit = self.state.units[kill.job_id]
            since_s = self.now_s if unit.killed_since_s is None else unit.killed_since_s
            self._set(replace(unit, killed_since_s=since_s, act_again_s=None))
            self._do(ms.ActOnUnit(kill.job_id, ms.UnitAct.KILL))
        if made.starts or made.asks or made.kills:  # the report is of the state after these acts
            made = plan_units(self._situation(), self.now_s, self.state.policy)
        hangs = (LOOK_HANGS,) if self.state.look_hangs else ()
        troubles = (*hangs, *self.state.troubles, *made.troubles)
        living = [u for u in self.state.units.values() if u.alive]
        status = f"{len(living)} jobs in {sum(len(u.slots) for u in living)} of {self.state.slots} slots"
        status += f"; {troubles[0]}" if troubles else ""
        self._know(again_s=made.again_at_s)
        note = "; ".join(filter(None, (self.state.note, *self.state.notes)))
        self._do(ms.Report(made.report, troubles, note, status))

    def _known_submissions(self) -> frozenset[tuple[str, str]]:
        """Returns the jobs that the cluster has, or that have a unit here, with the nonces of their submissions; empty
        where a nonce is not known."""
        state = self.state
        return frozenset(
            [(job_id, nonce_of(submission)) for job_id, submission in state.submissions.items()]
            + [(job_id, ended_submission(o) or self._nonce(job_id)) for job_id, o in state.outcomes.items()]
            + [(unit.job_id, unit.nonce) for unit in state.units.values()]
        )

    def _situation(self) -> UnitSituation:
        state = self.state
        wishes = {
            job_id: Wish.STOP if submission.wanted == pb.Submission.STOP else Wish.RUN
            for job_id, submission in state.submissions.items()
        } | dict.fromkeys(state.outcomes, Wish.OVER)
        nonces = {job_id: nonce_of(submission) for job_id, submission in state.submissions.items()}
        return UnitSituation(state.slots, state.orders, tuple(state.units.values()), wishes, nonces)

    def _start(self, start: PlannedStart) -> None:
        job_id, submission = start.job_id, self.state.submissions[start.job_id]
        before = self.state.units.get(job_id)
        unit = OwnUnit(
            job_id,
            True,
            slots=start.slots,
            order=start.order,
            shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,  # until its request is read
            failures=before.failures if before is not None else 0,
            nonce=nonce_of(submission),
            started_s=self.now_s,
            is_starting=True,
        )
        self._set(unit)
        self._say(f"job {job_id} starts in slots {_text(start.slots)}")
        self._do(ms.StartUnit(submission, start.slots, start.order, unit.failures))


def _without(mapping: Mapping[str, T], key: str) -> dict[str, T]:
    return {k: v for k, v in mapping.items() if k != key}


def _text(slots: tuple[int, ...]) -> str:
    return ", ".join(map(str, slots)) or "unknown"
