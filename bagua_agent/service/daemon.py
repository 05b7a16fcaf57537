"""A node's daemon: reports the node, follows its orders, starts and ends units. It runs no job itself.

One loop with an inbox; operations that may block (systemd, accounts, etcd's transactions) run in one other thread, in
the order of the requests. Decides nothing itself: cluster/unit_plan.py decides what happens to units; scheduler.py runs
independently in the same process. The daemon may be killed at any moment: all that it must remember is stored beside
the units and in etcd.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bagua_agent.base.background import Background, Failed, OperationEnd, Succeeded
from bagua_agent.base.errors import InternalError, UserError
from bagua_agent.base.messages import HelperFailed
from bagua_agent.base.plain_text import plain_line, shortened
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import (
    PROTOCOL,
    UnreadableRecord,
    ended_submission,
    nonce_of,
    parse_submission,
    read_orders,
    read_removal,
    write_removal,
    write_unit,
)
from bagua_agent.cluster.cluster_view import OrderView, RemovalView
from bagua_agent.cluster.node_trouble import failures_after
from bagua_agent.cluster.retention import is_worth_putting_back
from bagua_agent.cluster.unit_plan import OwnUnit, StartUnit, UnitPlan, UnitSituation, Wish, plan_units
from bagua_agent.cluster_state.odd_records import OddRecords
from bagua_agent.config.job_config import SHUTDOWN_TIMEOUT_S
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Put, Store, absent
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change, Mirror
from bagua_agent.history.job_history import agent_failed
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.failure_events import write_failure
from bagua_agent.service.logs.kept_logs import KeptLogs, owners_folder
from bagua_agent.service.node.node_facts import NodeFacts
from bagua_agent.service.notify import Notifier
from bagua_agent.service.store_touch import StoreTouch
from bagua_agent.service.units.pid_watch import PidWatch
from bagua_agent.service.units.unit_request import unit_request
from bagua_agent.service.units.units import FoundUnit, UnitFolders, UnitNote, UnitRunner, units_folder
from bagua_contract import cluster_pb2 as pb

TRY_AGAIN_S = 1.0
LOOK_EVERY_S = 60.0  # at the node itself
LOOK_AGAIN_S = 5.0  # once it looks otherwise than before
LOOK_SOON_S = 0.2  # a living unit has no process yet, or none any more, so its end is not reported
LONGEST_SLEEP_S = 60.0


# -- what the inbox holds


@dataclass(frozen=True, slots=True)
class Changed:
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class UnitsSeen:
    units: tuple[FoundUnit, ...]


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The main process of a unit."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Started:
    """From here on UnitsSeen knows of it. shutdown_timeout_s: the job's own; None: not known.

    trouble: what kept it from starting, which may pass; empty for nothing.
    """

    job_id: str
    shutdown_timeout_s: float | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class StartRefused:
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeSeen:
    troubles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Noted:
    """What of this node does not work now and keeps no job away; empty for nothing."""

    text: str


@dataclass(frozen=True, slots=True)
class StandsAgain:
    """A key that the store had lost. was_put: by this node; else it stood again, or its job was removed."""

    key: str
    was_put: bool


@dataclass(frozen=True, slots=True)
class StoreInTouch:
    """Whether the store's watch is connected."""

    up: bool


@dataclass(frozen=True, slots=True)
class LogsRemoved:
    """Of a removed job. had_any: on this node."""

    job_id: str
    had_any: bool


@dataclass(frozen=True, slots=True)
class FailureTold:
    """Among the events of this job, unless it is over or removed."""

    job_id: str


@dataclass(frozen=True, slots=True)
class NotDone:
    """The unit runner, or etcd, did not carry out a request: read the state again, and retry what is still due."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Event = (
    Changed
    | UnitsSeen
    | ProcessEnded
    | Started
    | StartRefused
    | NodeSeen
    | Noted
    | StandsAgain
    | FailureTold
    | StoreInTouch
    | LogsRemoved
    | NotDone
    | HelperFailed
)
Message = Event | Stop | None


class NodeDaemon:
    """`run` until `stop`; units go on after it. say: a line for the log."""

    def __init__(
        self,
        config: AgentConfig,
        facts: NodeFacts,
        store: Store,
        leased: LeasedKeys,
        runner: UnitRunner,
        say: Callable[[str], None],
        address: str,
        version: str,
        policy: ClusterPolicy | None = None,
        notifier: Notifier | None = None,
        look_for_trouble: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """address: host:port of this daemon's service. look_for_trouble: what is wrong with the node; may block."""
        self._config = config
        self._facts = facts
        self._store = store
        self._leased = leased
        self._runner = runner
        self._say = say
        self._odd = OddRecords(say)
        self._policy = policy or config.cluster_policy
        self._notifier = notifier or Notifier()
        self._node = pb.Node(
            protocol=PROTOCOL,
            node_name=config.node_name,
            address=address,
            slots=facts.slots,
            labels=dict(config.node_labels),
            version=version,
            boot_id=facts.boot_id,
        )
        self._key = cluster_keys.node(config.node_name)
        self._orders_key = cluster_keys.orders(config.node_name)
        self._folders = UnitFolders(units_folder(config.directories_state))
        self._logs = KeptLogs(
            owners_folder(config.directories_state), Path(config.directories_log), config.node_name
        )
        self._touch = StoreTouch(self._policy.put_back_within_s, _clock_s())
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._hands = Background("bagua-hands")
        self._watch = PidWatch(
            lambda job_id: self._inbox.put(ProcessEnded(job_id)),
            lambda failed: self._inbox.put(HelperFailed("watching units for their end", failed.reason)),
        )
        self._mirror = Mirror(
            store,
            [
                KeyRange.of_key(self._key),
                KeyRange.of_key(self._orders_key),
                KeyRange.of_prefix(cluster_keys.SUBMISSIONS),
                KeyRange.of_prefix(cluster_keys.OUTCOMES),
                KeyRange.of_prefix(cluster_keys.REMOVALS),
            ],
            lambda changes: self._inbox.put(Changed(changes)),
            lambda up: self._inbox.put(StoreInTouch(up)),
        )
        self._orders: tuple[OrderView, ...] | None = None
        self._orders_value: bytes | None = None
        self._submissions: dict[str, pb.Submission] = {}
        self._outcomes: dict[str, bytes] = {}
        self._removals: dict[str, RemovalView] = {}
        # by key: what stood there, and the nonce of the submission that it is of, if of any
        self._to_put_back: dict[str, tuple[bytes, str]] = {}
        self._look_due_s: float | None = None
        self._units: dict[str, OwnUnit] = {}
        self._started_s: dict[str, float] = {}
        self._watched: dict[str, int] = {}
        self._gone: dict[str, int] = {}  # processes that have ended, of units that may not have yet
        self._starting: set[str] = set()
        self._told = b""
        self._look_for_trouble = look_for_trouble
        self._troubles: tuple[str, ...] = ()
        self._troubles_seen: tuple[str, ...] = ()
        self._note = ""
        self._looks_at_s = 0.0
        self._again_s: float | None = 0.0

    def runs(self, job_id: str) -> bool:
        """Whether a unit of it lives here; from any thread."""
        unit = self._units.get(job_id)
        return unit is not None and unit.alive

    def note(self, text: str) -> None:
        """What of this node does not work now and keeps no job away; empty for nothing. From any thread."""
        self._inbox.put(Noted(text))

    def stop(self) -> None:
        """From any thread, or a signal handler's."""
        self._inbox.put(Stop())

    def run(self) -> None:
        """Raises StoreUnavailable if etcd can't be read at the beginning."""
        try:
            for found in self._runner.found():
                self._find(found, time.monotonic())
            self._mirror.start()
            self._follow()
            self._notifier.ready()
            while self._hear():
                self._follow()
        finally:
            self._notifier.stopping()
            self._mirror.stop()
            self._watch.stop()
            self._hands.stop()

    # -- hearing

    def _hear(self) -> bool:
        """Wait for a message or the time; False: stop."""
        self._notifier.feed()
        waits = [LONGEST_SLEEP_S, self._notifier.feed_every_s or LONGEST_SLEEP_S]
        waits.append(max(0.0, self._looks_at_s - time.monotonic()))
        for due_s in (self._again_s, self._look_due_s):
            if due_s is not None:
                waits.append(max(0.0, due_s - time.monotonic()))
        try:
            message = self._inbox.get(timeout=min(waits))
            self._touch.passed(_clock_s())
            while True:
                if isinstance(message, Stop):
                    return False
                if message is not None:
                    self._take(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            self._touch.passed(_clock_s())
            return True

    def _take(self, message: Event) -> None:
        now_s = time.monotonic()
        match message:
            case Changed(changes):
                for change in changes:
                    with self._odd.passing_over(change.key):
                        self._take_change(change)
            case UnitsSeen(units):
                self._take_units(units, now_s)
            case Started(job_id, timeout_s, trouble):
                self._starting.discard(job_id)
                if trouble:
                    self._say(trouble)
                    if job_id in self._units:
                        # its end, which is seen next, has no other reason
                        why = shortened(plain_line(trouble))
                        self._units[job_id] = replace(self._units[job_id], reason=why)
                if timeout_s is not None and job_id in self._units:
                    self._units[job_id] = replace(self._units[job_id], shutdown_timeout_s=timeout_s)
                self._by_hand("looking for units", self._look)
            case StartRefused(job_id, reason):
                self._starting.discard(job_id)
                # it becomes part of this node's record, which etcd has to take
                reason = shortened(plain_line(reason))
                self._say(f"job {job_id} is refused here: {reason}")
                failures = self._units[job_id].failures if job_id in self._units else 0
                nonce = self._units[job_id].nonce if job_id in self._units else ""
                self._units[job_id] = OwnUnit(
                    job_id, False, ended_s=now_s, failures=failures, refused=True, reason=reason, nonce=nonce
                )
                self._tell_failure(job_id, 0, reason)
            case NodeSeen(troubles):
                self._seen_troubles(troubles, now_s)
            case Noted(text):
                self._note = text
            case ProcessEnded(job_id):
                if job_id in self._watched:
                    self._gone[job_id] = self._watched[job_id]
                self._by_hand("looking for units", self._look)
            case StandsAgain(key, was_put):
                self._to_put_back.pop(key, None)
                if was_put:
                    self._say(f"etcd has lost {key}; it is put back as this node remembers it")
            case StoreInTouch(up):
                self._touch.connected(up, _clock_s())
            case LogsRemoved(job_id, had_any):
                if had_any:
                    self._say(f"job {job_id} was removed, and its logs here with it")
            case FailureTold():
                pass
            case NotDone(reason):
                self._say(reason)
                self._look_due_s = now_s + TRY_AGAIN_S
            case HelperFailed(what, reason):
                raise InternalError(f"{what} failed: {reason}; the daemon ends, units go on; start it again")

    def _take_change(self, change: Change) -> None:
        if change.key == self._key:
            if change.value is None:  # an outage outlived the lease, or a person removed it
                self._say(
                    "etcd has lost this node's key; without it the node counts as lost, so it is put back"
                )
                self._leased.recheck()
            return
        if change.key == self._orders_key:
            if change.value is None:
                if self._orders_value is not None:
                    self._put_back(self._orders_key, self._orders_value)
                return
            with self._odd.passing_over(change.key, "units go on as they are"):
                self._orders, self._orders_value = read_orders(change.value), change.value
            return
        job_id = cluster_keys.id_in(cluster_keys.SUBMISSIONS, change.key)
        if job_id is not None:
            if change.value is None:
                known = self._submissions.get(job_id)
                if known is not None and not self._put_back(
                    change.key, known.SerializeToString(), nonce_of(known)
                ):
                    del self._submissions[job_id]
                return
            submission = parse_submission(change.value, job_id)
            if nonce_of(submission) not in self._removals:  # else another daemon put it back, not knowing
                self._submissions[job_id] = submission
            return
        job_id = cluster_keys.id_in(cluster_keys.OUTCOMES, change.key)
        if job_id is not None:
            if change.value is not None:
                self._outcomes[job_id] = change.value
            elif (outcome := self._outcomes.get(job_id)) is not None:
                of = ended_submission(outcome) or self._nonce(job_id)
                if not self._put_back(change.key, outcome, of):
                    del self._outcomes[job_id]
            return
        nonce = cluster_keys.id_in(cluster_keys.REMOVALS, change.key)
        if nonce is not None:
            self._take_removal(nonce, change)
            return
        if change.value is not None:
            raise UnreadableRecord("no job can have this name")

    def _nonce(self, job_id: str) -> str:
        """Of the submission that is known; empty for none."""
        submission = self._submissions.get(job_id)
        return "" if submission is None else nonce_of(submission)

    def _take_removal(self, nonce: str, change: Change) -> None:
        """Forget the job, whatever was heard first: that it was removed, or that its keys are gone."""
        if change.value is None:
            removal = self._removals.pop(nonce, None)
            if removal is not None and is_worth_putting_back(removal, time.time(), self._policy):
                self._put_back(change.key, write_removal(removal))
            return
        removal = self._removals[nonce] = read_removal(change.value)
        job_id = removal.job_id
        outcome = self._outcomes.get(job_id)
        if outcome is not None and (ended_submission(outcome) or self._nonce(job_id)) == nonce:
            del self._outcomes[job_id]
        if self._nonce(job_id) == nonce:
            del self._submissions[job_id]
        for key, (_, of) in list(self._to_put_back.items()):
            if of == nonce:
                del self._to_put_back[key]
        unit = self._units.get(job_id)
        if unit is not None and not unit.alive and unit.nonce == nonce:
            del self._units[job_id]
            self._forget(job_id)
        self._by_hand(
            f"job {job_id}: removing its logs", lambda: LogsRemoved(job_id, self._logs.remove(job_id, nonce))
        )

    def _put_back(self, key: str, value: bytes, nonce: str = "") -> bool:
        """Put back what the store has lost (invariant 4), unless it was removed with its job. nonce: of the submission
        that the key is of, if it is of any. False: it is to be forgotten."""
        if nonce in self._removals:
            return False
        if not self._touch.may_put_back:
            self._say(f"{key} is gone; this node was out of touch for so long that it does not put it back")
            return False
        self._to_put_back[key] = (value, nonce)
        self._put_if_absent(key, value, nonce)
        return True

    def _put_if_absent(self, key: str, value: bytes, nonce: str) -> None:
        missing = [absent(key), *([absent(cluster_keys.removal(nonce))] if nonce else [])]

        def put() -> StandsAgain:
            return StandsAgain(key, self._store.transact(missing, [Put(key, value)]).succeeded)

        self._by_hand(f"putting {key} back", put)

    # -- units

    def _find(self, found: FoundUnit, now_s: float) -> None:
        """One that an earlier daemon started."""
        note = self._folders.note(found.job_id)
        self._units[found.job_id] = OwnUnit(
            found.job_id,
            found.is_alive,
            slots=note.slots,
            order=note.order,
            shutdown_timeout_s=note.shutdown_timeout_s,
            # A second SIGTERM would end it at once, instead of at a step boundary.
            asked_since_s=now_s if found.is_alive and self._folders.was_asked(found.job_id) else None,
            ended_s=now_s,
            exit_code=found.exit_code or 0,
            failures=note.failures,
            nonce=note.nonce,
        )
        self._started_s[found.job_id] = now_s
        if found.is_alive:
            self._say(f"job {found.job_id} runs here already, in slots {_text(note.slots)}")
            self._watch_over(found)

    def _watch_over(self, found: FoundUnit) -> None:
        if found.pid in (0, self._gone.get(found.job_id)):
            self._look_due_s = time.monotonic() + LOOK_SOON_S
        elif self._watched.get(found.job_id) != found.pid:
            try:
                self._watch.add(found.job_id, found.pid)
            except OSError as error:  # no descriptor left
                self._say(
                    f"job {found.job_id}: its process {found.pid} can't be watched yet: {error.strerror}"
                )
                self._look_due_s = time.monotonic() + TRY_AGAIN_S
            else:
                self._watched[found.job_id] = found.pid

    def _take_units(self, units: tuple[FoundUnit, ...], now_s: float) -> None:
        there = {u.job_id: u for u in units}
        for job_id, unit in list(self._units.items()):
            found = there.get(job_id)
            if found is not None and found.is_alive:
                if unit.reason:  # it was started after all, only not confirmed in time
                    self._units[job_id] = replace(unit, reason="")
                self._watch_over(found)
            elif unit.alive and job_id not in self._starting:
                code = found.exit_code if found is not None and found.exit_code is not None else 128 + 9
                self._ended(unit, code, now_s)

    def _ended(self, unit: OwnUnit, code: int, now_s: float) -> None:
        asked = unit.asked_since_s is not None or code == 0
        ran_s = now_s - self._started_s.get(unit.job_id, now_s)
        reason = unit.reason or f"its agent ended with {code}"
        if not unit.reason and (why := self._folders.reason(unit.job_id)):
            reason += f": {plain_line(why)}"
        self._say(f"job {unit.job_id}: {reason}")
        failures = failures_after(unit.failures, ran_s, asked, self._policy)
        self._units[unit.job_id] = replace(
            unit,
            alive=False,
            slots=(),
            ended_s=now_s,
            exit_code=code,
            failures=failures,
            asked_since_s=None,
            killed_since_s=None,
            reason=reason,
        )
        self._watched.pop(unit.job_id, None)
        self._gone.pop(unit.job_id, None)
        self._by_hand_on(unit.job_id, "forgetting it", self._runner.forget)
        if not asked:
            self._tell_failure(unit.job_id, failures, reason)

    def _tell_failure(self, job_id: str, failures: int, reason: str) -> None:
        """Among the job's events, where people look when its agent never came to write one."""
        submission = self._submissions.get(job_id)
        if submission is None:
            return
        event = agent_failed(self._config.node_name, failures, reason)

        def tell() -> FailureTold:
            write_failure(self._store, submission, event, self._config.node_name)
            return FailureTold(job_id)

        self._by_hand(f"job {job_id}: writing its failure among its events", tell)

    def _seen_troubles(self, troubles: tuple[str, ...], now_s: float) -> None:
        """They count once two looks in a row agree: one that comes and goes must not move jobs about."""
        if troubles == self._troubles_seen and troubles != self._troubles:
            self._say(f"in trouble: {'; '.join(troubles)}" if troubles else "in trouble no more")
            self._troubles = troubles
        hurries = troubles != self._troubles
        self._troubles_seen = troubles
        self._looks_at_s = now_s + (LOOK_AGAIN_S if hurries else LOOK_EVERY_S)

    # -- following

    def _follow(self) -> None:
        """Do what the plan says, and tell the cluster how the units are."""
        now_s = time.monotonic()
        if now_s >= self._looks_at_s:
            self._looks_at_s = now_s + LOOK_EVERY_S
            self._by_hand("looking at the node", lambda: NodeSeen(self._look_for_trouble()))
        if self._look_due_s is not None and now_s >= self._look_due_s:
            self._look_due_s = None
            self._by_hand("looking for units", self._look)
            for key, (value, nonce) in self._to_put_back.items():
                self._put_if_absent(key, value, nonce)
        made = plan_units(self._situation(), now_s, self._policy)
        for job_id in made.forgets:
            del self._units[job_id]
            self._forget(job_id)
        for start in made.starts:
            self._start(start, now_s)
        for ask in made.asks:
            self._say(f"job {ask.job_id} is asked to leave: {ask.reason}")
            self._units[ask.job_id] = replace(self._units[ask.job_id], asked_since_s=now_s)
            self._by_hand_on(ask.job_id, "asking it to leave", self._ask_to_leave)
        for kill in made.kills:
            self._say(f"job {kill.job_id} is killed: {kill.reason}")
            self._units[kill.job_id] = replace(self._units[kill.job_id], killed_since_s=now_s)
            self._by_hand_on(kill.job_id, "killing it", self._runner.kill)
        if made.starts or made.asks or made.kills:
            made = plan_units(
                self._situation(), now_s, self._policy
            )  # the report is of the state after these acts
        self._again_s = made.again_at_s
        self._tell(made)

    def _situation(self) -> UnitSituation:
        wishes = {}
        for job_id, submission in self._submissions.items():
            stop = submission.wanted == pb.Submission.STOP
            wishes[job_id] = Wish.STOP if stop else Wish.RUN
        wishes |= dict.fromkeys(self._outcomes, Wish.OVER)
        nonces = {job_id: nonce_of(submission) for job_id, submission in self._submissions.items()}
        return UnitSituation(self._facts.slots, self._orders, tuple(self._units.values()), wishes, nonces)

    def _start(self, start: StartUnit, now_s: float) -> None:
        submission = self._submissions[start.job_id]
        before = self._units.get(start.job_id)
        failures = before.failures if before is not None else 0
        self._units[start.job_id] = OwnUnit(
            start.job_id,
            True,
            slots=start.slots,
            order=start.order,
            shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,  # until its request is read
            failures=failures,
            nonce=nonce_of(submission),
        )
        self._started_s[start.job_id] = now_s
        self._starting.add(start.job_id)
        self._say(f"job {start.job_id} starts in slots {_text(start.slots)}")
        self._begin(submission, start, failures)

    def _tell(self, made: UnitPlan) -> None:
        node = self._node
        del node.units[:]
        node.units.extend(map(write_unit, made.report))
        del node.troubles[:]
        node.troubles.extend((*self._troubles, *made.troubles))
        node.note = self._note
        value = node.SerializeToString(deterministic=True)
        if value != self._told:
            self._told = value
            self._leased.put(self._key, value)
        running = sum(u.alive for u in self._units.values())
        slots = sum(len(u.slots) for u in self._units.values() if u.alive)
        trouble = f"; {node.troubles[0]}" if node.troubles else ""
        self._notifier.status(f"{running} jobs in {slots} of {self._facts.slots} slots{trouble}")

    # -- the hands: what may block

    def _by_hand(self, what: str, operation: Callable[[], Event]) -> None:
        """Do something that may block; its event comes to the inbox, NotDone if it raises."""

        def ended(end: OperationEnd[Event]) -> None:
            self._inbox.put(NotDone(f"{what} failed: {end.reason}") if isinstance(end, Failed) else end.value)

        self._hands.run(what, operation, ended)

    def _by_hand_on(self, job_id: str, what: str, action: Callable[[str], object]) -> None:
        """Do something with a unit, then look at all of them."""

        def act() -> UnitsSeen:
            action(job_id)
            return self._look()

        self._by_hand(f"job {job_id}: {what}", act)

    def _begin(self, submission: pb.Submission, start: StartUnit, failures: int) -> None:
        job_id = start.job_id

        def begin() -> float:
            request = unit_request(submission, start.slots, self._config, have_gpus=self._facts.gpus > 0)
            timeout_s = request.config.shutdown_timeout_s
            nonce = nonce_of(submission)
            self._logs.begin(job_id, nonce)
            note = UnitNote(start.order, start.slots, failures, timeout_s, nonce)
            self._runner.start(job_id, self._folders.make(request, note))
            return timeout_s

        def ended(end: OperationEnd[float]) -> None:
            match end:
                case Failed(UserError() as error):
                    self._inbox.put(StartRefused(job_id, str(error)))
                case Failed(error) if end.is_bug and not isinstance(error, OSError):
                    # It must not be tried for good: what raised may lie in the submission.
                    why = f"a bug in this daemon raised {type(error).__name__}; its log has the traceback"
                    self._inbox.put(StartRefused(job_id, why))
                case Failed():
                    self._inbox.put(Started(job_id, None, f"job {job_id} was not started: {end.reason}"))
                case Succeeded(timeout_s):
                    self._inbox.put(Started(job_id, timeout_s))

        self._hands.run(f"starting job {job_id}", begin, ended)

    def _ask_to_leave(self, job_id: str) -> None:
        try:
            self._folders.mark_asked(job_id)
        except OSError as error:  # a full disk must not keep it here; at worst a later daemon asks once more
            self._say(f"job {job_id}: that it is asked to leave was not noted: {error}")
        self._runner.ask_to_leave(job_id)

    def _forget(self, job_id: str) -> None:
        def forget(job_id: str) -> None:
            self._runner.forget(job_id)
            self._folders.remove(job_id)

        self._by_hand_on(job_id, "forgetting it", forget)

    def _look(self) -> UnitsSeen:
        return UnitsSeen(tuple(self._runner.found()))


def _clock_s() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _text(slots: tuple[int, ...]) -> str:
    return ", ".join(map(str, slots)) or "unknown"
