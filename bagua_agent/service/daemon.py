"""A node's daemon: reports the node, follows its orders, starts and ends units. It runs no job itself.

One loop with an inbox; operations that may block (systemd, accounts, etcd's transactions) run in other threads
(blocking_work.py). Decides nothing itself: state_machine/machine.py says which actions follow an event; scheduler.py
runs independently in the same process. The daemon may be killed at any moment: all that it must remember is stored
beside the units and in etcd.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bagua_agent.base.errors import InternalError
from bagua_agent.base.messages import HealthAsked, HelperFailed
from bagua_agent.base.pid_watch import PidWatch
from bagua_agent.base.plain_text import shortened
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.cluster_state.odd_records import OddRecords
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change, Mirror
from bagua_agent.metrics.daemon_picture import DaemonPictureAsked, picture_of
from bagua_agent.metrics.discovery import is_address, targets
from bagua_agent.service.blocking_work import BlockingWork, ThisNode
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.etcd_contact import EtcdContact
from bagua_agent.service.node.node_record import LEASES_OF_ANOTHER, NodeRecord
from bagua_agent.service.notify import Notifier
from bagua_agent.service.state_machine import messages as ms
from bagua_agent.service.state_machine.machine import step
from bagua_agent.service.state_machine.state import Now, State
from bagua_agent.service.units.units import UnitRunner
from bagua_contract import cluster_pb2 as pb
from bagua_contract.addresses import parted

LONGEST_SLEEP_S = 60.0


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
        node: ThisNode,
        store: Store,
        leased: LeasedKeys,
        runner: UnitRunner,
        say: Callable[[str], None],
        policy: ClusterPolicy | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        """Creates the daemon; `run` runs it."""
        self._runner = runner
        self._say = say
        self._odd = OddRecords(say)
        self._notifier = notifier or Notifier()
        self._stopping = threading.Event()
        self._orders_key = cluster_keys.orders(config.node_name)
        self._state = State(config.node_name, node.facts.slots, policy or config.cluster_policy)
        record = pb.Node(
            protocol=PROTOCOL,
            node_name=config.node_name,
            address=node.address,
            slots=node.facts.slots,
            labels=dict(config.node_labels),
            version=node.version,
            boot_id=node.facts.boot_id,
        )
        claim_within_s = LEASES_OF_ANOTHER * config.times_node_lease_s
        self._record = NodeRecord(store, leased, record, claim_within_s, self._stopping)
        self._etcd_contact = EtcdContact(self._state.policy.put_back_within_s, _clock_s())
        self._in_touch = False  # whether etcd's watch is connected
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        kept_s = self._state.policy.removal_kept_s
        self._work = BlockingWork(config, node, store, runner, say, self._odd, self._inbox.put, kept_s)
        self._watch = PidWatch[str](
            "bagua-pid-watch",
            lambda job_id: self._inbox.put(ms.ProcessEnded(job_id)),
            lambda failed: self._inbox.put(HelperFailed("watching units for their end", failed.reason)),
        )
        self._mirror = Mirror(
            store,
            [
                KeyRange.of_key(self._record.key),
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
        found = self._work.folders.metrics_addresses()
        alive = {job_id: address for job_id, address in found.items() if self.runs(job_id)}
        for job_id, address in alive.items():
            if not is_address(address):
                what = f"{shortened(address)!r} is no HOST:PORT; /targets leaves the job out"
                self._odd.tell(f"metrics address of job {job_id}", what)
        node = self._record.node
        return targets(alive, node.node_name, parted(node.address)[0])

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
                note, was_asked = (
                    self._work.folders.note(found.job_id),
                    self._work.folders.was_asked(found.job_id),
                )
                self._step(ms.UnitKept(found, note, was_asked))
            self._step(ms.InboxDrained())
            self._mirror.start()
            # behind the records, which tell which submissions the units that have ended are of
            self._inbox.put(ms.UnitsSeen(kept, self._work.folders.reasons()))
            self._notifier.ready()
            while self._hear():
                self._step(ms.InboxDrained())
        finally:
            self._notifier.stopping()
            self._mirror.stop()
            self._watch.stop()
            self._work.stop()

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
                    if change.key == self._record.key:
                        self._record.changed(change)
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
                message.answer.put(picture_of(self._record.node, in_touch=self._in_touch))
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
            case ms.WatchProcess(job_id, pid):
                try:
                    self._watch.add(job_id, os.pidfd_open(pid))
                except ProcessLookupError:
                    self._inbox.put(ms.ProcessEnded(job_id))
                except OSError as error:  # no descriptor left
                    self._inbox.put(ms.WatchFailed(job_id, pid, str(error.strerror)))
            case ms.RecheckNodeKey():
                self._record.recheck()
            case ms.Report():
                if self._record.report(action):
                    self._notifier.status(action.status)
            case _:
                self._work.perform(action)


def _clock_s() -> float:
    """Returns the seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
