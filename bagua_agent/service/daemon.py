"""A node's daemon: reports the node, follows its orders, starts and ends units. It runs no job itself.

One loop with an inbox; operations that may block (systemd, accounts, etcd's transactions) run in one other thread, in
the order of the requests. Looks at the node have a thread of their own, for a driver or a disk may hang. Decides
nothing itself: state_machine/machine.py says which actions follow an event; scheduler.py runs independently in the same
process. The daemon may be killed at any moment: all that it must remember is stored beside the units and in etcd.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.background import Background, Failed, OperationEnd, Succeeded
from bagua_agent.base.errors import InfrastructureLost, InternalError, OutcomeUnknown, UserError
from bagua_agent.base.messages import HealthAsked, HelperFailed
from bagua_agent.base.pid_watch import PidWatch
from bagua_agent.base.plain_text import shortened
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import PROTOCOL, nonce_of, write_unit
from bagua_agent.cluster_state.odd_records import OddRecords
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Put, Store, absent, mod_revision_is
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change, Mirror
from bagua_agent.history.job_history import agent_failed
from bagua_agent.metrics.daemon_picture import DaemonPictureAsked, picture_of
from bagua_agent.metrics.discovery import is_address, targets
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.etcd_contact import EtcdContact
from bagua_agent.service.failure_events import write_failure
from bagua_agent.service.logs.kept_logs import KeptLogs, owners_folder
from bagua_agent.service.node.node_facts import NodeFacts
from bagua_agent.service.node.own_name import check_own, claim, taker
from bagua_agent.service.notify import Notifier
from bagua_agent.service.state_machine import messages as ms
from bagua_agent.service.state_machine.machine import step
from bagua_agent.service.state_machine.state import Now, State
from bagua_agent.service.units.unit_request import unit_request
from bagua_agent.service.units.units import UnitFolders, UnitNote, UnitRunner, units_folder
from bagua_contract import cluster_pb2 as pb
from bagua_contract.addresses import parted

LONGEST_SLEEP_S = 60.0
LOOK_STOP_S = 1.0  # one that hangs is left behind
LEASES_OF_ANOTHER = 2.0  # a change of etcd's leader gives each lease its whole time again
_ACTS = {
    ms.UnitAct.ASK_TO_LEAVE: "asking it to leave",
    ms.UnitAct.KILL: "killing it",
    ms.UnitAct.FORGET: "forgetting it",
    ms.UnitAct.REMOVE: "forgetting it",
}


@dataclass(frozen=True, slots=True)
class _Changed:
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class _StoreInTouch:
    up: bool  # whether the store's watch is connected


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = ms.Event | _Changed | _StoreInTouch | _Stop | HelperFailed | HealthAsked | DaemonPictureAsked


class NodeDaemon:
    """The daemon's loop: it runs from `run` until `stop`; units go on after it. say: logs a line; from any thread."""

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
        look_for_notes: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """Creates the daemon; `run` runs it. address: host:port of this daemon's service. look_for_trouble: returns
        what is wrong with the node; look_for_notes: returns what people should see to; they may block."""
        self._config = config
        self._facts = facts
        self._store = store
        self._leased = leased
        self._runner = runner
        self._say = say
        self._odd = OddRecords(say)
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
        self._told = b""
        self._stopping = threading.Event()
        self._key = cluster_keys.node(config.node_name)
        self._orders_key = cluster_keys.orders(config.node_name)
        self._folders = UnitFolders(units_folder(config.directories_state))
        self._logs = KeptLogs(
            owners_folder(config.directories_state), Path(config.directories_log), config.node_name
        )
        self._look_for_trouble = look_for_trouble
        self._look_for_notes = look_for_notes
        self._state = State(config.node_name, facts.slots, policy or config.cluster_policy)
        self._etcd_contact = EtcdContact(self._state.policy.put_back_within_s, _clock_s())
        self._in_touch = False  # whether etcd's watch is connected
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._hands = Background("bagua-hands")
        self._looks = Background("bagua-looks")
        self._watch = PidWatch[str](
            "bagua-pid-watch",
            lambda job_id: self._inbox.put(ms.ProcessEnded(job_id)),
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
            lambda changes: self._inbox.put(_Changed(changes)),
            lambda up: self._inbox.put(_StoreInTouch(up)),
        )

    def runs(self, job_id: str) -> bool:
        """Tells whether a living unit of the job is on this node. Can be called from any thread."""
        unit = self._state.units.get(job_id)
        return unit is not None and unit.alive

    def metrics_targets(self) -> bytes:
        """Returns the addresses at which the jobs that live here serve their metrics, in the form that Prometheus
        reads. Can be called from any thread."""
        found = self._folders.metrics_addresses()
        alive = {job_id: address for job_id, address in found.items() if self.runs(job_id)}
        for job_id, address in alive.items():
            if not is_address(address):
                what = f"{shortened(address)!r} is no HOST:PORT; /targets leaves the job out"
                self._odd.tell(f"metrics address of job {job_id}", what)
        return targets(alive, self._config.node_name, parted(self._node.address)[0])

    def note(self, text: str) -> None:
        """Records what of this node does not work now and keeps no job away; empty for nothing. Can be called from any
        thread."""
        self._inbox.put(ms.Noted(text))

    def ask(self, question: HealthAsked | DaemonPictureAsked) -> None:
        """Puts a question to the loop, which answers it. Can be called from any thread."""
        self._inbox.put(question)

    def stop(self) -> None:
        """Stops the loop. Can be called from any thread and from a signal handler."""
        self._stopping.set()
        self._inbox.put(_Stop())

    def run(self) -> None:
        """Runs the loop until `stop`. Raises StoreUnavailable if etcd can't be read at the beginning, and NameTaken if
        another daemon has this node's name."""
        try:
            self._watch.start()
            kept = tuple(self._runner.found())
            for found in kept:
                note, was_asked = self._folders.note(found.job_id), self._folders.was_asked(found.job_id)
                self._step(ms.UnitKept(found, note, was_asked))
            self._step(ms.InboxDrained())
            self._mirror.start()
            # behind the records, which tell which submissions the units that have ended are of
            self._inbox.put(ms.UnitsSeen(kept, self._folders.reasons()))
            self._notifier.ready()
            while self._hear():
                self._step(ms.InboxDrained())
        finally:
            self._notifier.stopping()
            self._mirror.stop()
            self._watch.stop()
            self._hands.stop()
            self._looks.stop(LOOK_STOP_S)

    def _hear(self) -> bool:
        """Waits for a message or the time, and takes all messages that wait. Returns False if the daemon is to stop."""
        self._notifier.feed()
        due_s = max(0.0, self._state.wake_at_s - time.monotonic())
        try:
            message = self._inbox.get(
                timeout=min(LONGEST_SLEEP_S, self._notifier.feed_every_s or LONGEST_SLEEP_S, due_s)
            )
            self._etcd_contact.passed(_clock_s())
            while not isinstance(message, _Stop):
                self._take(message)
                message = self._inbox.get_nowait()
            return False
        except queue.Empty:
            self._etcd_contact.passed(_clock_s())
            return True

    def _take(
        self,
        message: ms.Event | _Changed | _StoreInTouch | HelperFailed | HealthAsked | DaemonPictureAsked,
    ) -> None:
        match message:
            case _Changed(changes):
                for change in changes:
                    if change.key == self._key and change.value is not None:
                        check_own(change.value, change.lease_id, self._node)
                        if change.lease_id != self._leased.lease_id:  # an odd record, which is written over
                            self._leased.recheck()
                    is_orders = change.key == self._orders_key
                    follows = "units go on as they are" if is_orders else "it is passed over"
                    with self._odd.passing_over(change.key, follows):
                        self._step(ms.RecordChanged(change))
            case _StoreInTouch(up):
                self._etcd_contact.connected(up, _clock_s())
                self._in_touch = up
            case HealthAsked():
                message.answered.set()
            case DaemonPictureAsked():
                message.answer.put(picture_of(self._node, in_touch=self._in_touch))
            case HelperFailed(what, reason):
                raise InternalError(f"{what} failed: {reason}; the daemon ends, units go on; start it again")
            case event:
                self._step(event)

    def _step(self, event: ms.Event) -> None:
        now = Now(time.monotonic(), time.time(), self._etcd_contact.may_put_back, self._in_touch)
        self._state, actions = step(self._state, event, now)
        for action in actions:
            self._perform(action)

    def _perform(self, action: ms.Action) -> None:
        match action:
            case ms.Say(line):
                self._say(line)
            case ms.LookForUnits():
                self._by_hand("looking for units", self._look)
            case ms.LookAtNode():
                self._looks.run("looking at the node", self._look_at_node, self._looked)
            case ms.WatchProcess(job_id, pid):
                try:
                    self._watch.add(job_id, os.pidfd_open(pid))
                except ProcessLookupError:
                    self._inbox.put(ms.ProcessEnded(job_id))
                except OSError as error:  # no descriptor left
                    self._inbox.put(ms.WatchFailed(job_id, pid, str(error.strerror)))
            case ms.StartUnit():
                self._start(action)
            case ms.ActOnUnit(job_id, act):
                self._by_hand(f"job {job_id}: {_ACTS[act]}", lambda: self._act_on_unit(job_id, act))
            case ms.RemoveLogs(job_id, nonce):
                self._by_hand(f"job {job_id}: removing its logs", lambda: self._remove_logs(job_id, nonce))
            case ms.TidyLogs(known):
                self._by_hand("removing logs of jobs that are gone", lambda: self._tidy_logs(known))
            case ms.PutBack():
                self._by_hand(f"putting {action.key} back", lambda: self._put_back(action))
            case ms.TellFailure():
                what = f"job {action.submission.job_id}: writing its failure among its events"
                self._by_hand(what, lambda: self._tell_failure(action))
            case ms.RecheckNodeKey():
                self._leased.recheck()
            case ms.Report():
                self._report(action)

    def _report(self, report: ms.Report) -> None:
        node = self._node
        del node.units[:]
        node.units.extend(map(write_unit, report.units))
        del node.troubles[:]
        node.troubles.extend(report.troubles)
        node.note = report.note
        value = node.SerializeToString(deterministic=True)
        if value != self._told:
            if not self._told and not self._claim():
                return
            self._told = value
            self._leased.put(
                self._key, value, lambda found: taker(found.value, found.lease_id, node) is not None
            )
        self._notifier.status(report.status)

    def _claim(self) -> bool:
        """Claims the node's name with this daemon's first record. Returns False if the daemon was asked to stop before.
        Raises NameTaken."""
        within_s = LEASES_OF_ANOTHER * self._config.times_node_lease_s
        return claim(self._store, self._leased, self._node, within_s, self._stopping)

    # -- the hands: what may block

    def _by_hand(self, what: str, operation: Callable[[], ms.Event | None]) -> None:
        """Runs an operation that may block in the other thread. Its event comes to the inbox, NotDone if it raises."""

        def ended(end: OperationEnd[ms.Event | None]) -> None:
            event = ms.NotDone(f"{what} failed: {end.reason}") if isinstance(end, Failed) else end.value
            if event is not None:
                self._inbox.put(event)

        self._hands.run(what, operation, ended)

    def _look_at_node(self) -> ms.NodeSeen:
        return ms.NodeSeen(self._look_for_trouble(), self._look_for_notes())

    def _looked(self, end: OperationEnd[ms.NodeSeen]) -> None:
        self._inbox.put(ms.LookFailed(end.reason) if isinstance(end, Failed) else end.value)

    def _look(self) -> ms.UnitsSeen:
        found = tuple(self._runner.found())
        return ms.UnitsSeen(found, self._folders.reasons())

    def _act_on_unit(self, job_id: str, act: ms.UnitAct) -> ms.UnitsSeen | ms.ActFailed:
        try:
            self._do_to_unit(job_id, act)
        except InfrastructureLost as error:
            may_be_done = isinstance(error, OutcomeUnknown)
            if act is ms.UnitAct.ASK_TO_LEAVE and not may_be_done:
                self._folders.unmark_asked(job_id)
            return ms.ActFailed(job_id, act, f"job {job_id}: {_ACTS[act]} failed: {error}", may_be_done)
        return self._look()

    def _do_to_unit(self, job_id: str, act: ms.UnitAct) -> None:
        match act:
            case ms.UnitAct.ASK_TO_LEAVE:
                try:
                    self._folders.mark_asked(job_id)
                except OSError as error:
                    # a full disk must not keep it here; at worst a later daemon asks again
                    self._say(f"job {job_id}: that it is asked to leave was not noted: {error}")
                self._runner.ask_to_leave(job_id)
            case ms.UnitAct.KILL:
                self._runner.kill(job_id)
            case ms.UnitAct.FORGET | ms.UnitAct.REMOVE:
                self._runner.forget(job_id)
                if act is ms.UnitAct.REMOVE:
                    self._folders.remove(job_id)

    def _start(self, start: ms.StartUnit) -> None:
        submission, job_id = start.submission, start.submission.job_id

        def begin() -> float:
            request = unit_request(submission, start.slots, self._config, have_gpus=self._facts.gpus > 0)
            timeout_s = request.config.shutdown_timeout_s
            nonce = nonce_of(submission)
            self._logs.begin(job_id, nonce)
            note = UnitNote(start.order, start.slots, start.failures, timeout_s, nonce, time.time())
            self._runner.start(job_id, self._folders.make(request, note))
            return timeout_s

        def ended(end: OperationEnd[float]) -> None:
            match end:
                case Failed(UserError() as error):
                    self._inbox.put(ms.StartRefused(job_id, str(error)))
                case Failed(error) if end.is_bug and not isinstance(error, OSError):
                    # It must not be tried for good: what raised may lie in the submission.
                    why = f"a bug in this daemon raised {type(error).__name__}; its log has the traceback"
                    self._inbox.put(ms.StartRefused(job_id, why))
                case Failed():
                    self._inbox.put(ms.Started(job_id, None, f"job {job_id} was not started: {end.reason}"))
                case Succeeded(timeout_s):
                    self._inbox.put(ms.Started(job_id, timeout_s))

        self._hands.run(f"starting job {job_id}", begin, ended)

    def _remove_logs(self, job_id: str, nonce: str) -> None:
        if self._logs.remove(job_id, nonce):
            self._say(f"job {job_id} was removed, and its logs here with it")

    def _tidy_logs(self, known: frozenset[tuple[str, str]]) -> None:
        kept_s = self._state.policy.removal_kept_s
        removed, refused = self._logs.tidy(known, kept_s, time.time())
        for job_id in removed:
            self._say(f"job {job_id} was removed while this node was away, and its logs here are removed now")
        for job_id, why in refused:
            self._odd.tell(f"logs of job {job_id}", f"{why}; it was removed, so remove them by hand")

    def _put_back(self, put: ms.PutBack) -> ms.StandsAgain:
        unchanged = [mod_revision_is(put.key, put.over_revision)]
        unchanged += [absent(cluster_keys.removal(put.nonce))] if put.nonce else []
        return ms.StandsAgain(put, self._store.transact(unchanged, [Put(put.key, put.value)]).succeeded)

    def _tell_failure(self, told: ms.TellFailure) -> None:
        event = agent_failed(self._config.node_name, told.failures, told.reason)
        write_failure(self._store, told.submission, event, self._config.node_name)


def _clock_s() -> float:
    """Returns the seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
