"""A daemon's operations that may block: on units, their folders and logs, etcd's transactions, and looks at the node.

They run in one thread, in the order of the requests; looks at the node have a thread of their own, for a driver or a
disk may hang. The event that an operation ends with goes to the daemon's inbox.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.background import Background, Failed, OperationEnd, Succeeded
from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown, UserError
from bagua_agent.cluster.cluster_records import nonce_of
from bagua_agent.cluster_state.odd_records import OddRecords
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Put, Store, absent, mod_revision_is
from bagua_agent.history.job_history import agent_failed
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.failure_events import write_failure
from bagua_agent.service.logs.kept_logs import KeptLogs, owners_folder
from bagua_agent.service.node.node_facts import NodeFacts
from bagua_agent.service.state_machine import messages as ms
from bagua_agent.service.units.unit_request import unit_request
from bagua_agent.service.units.units import UnitFolders, UnitNote, UnitRunner, units_folder

LOOK_STOP_S = 1.0  # one that hangs is left behind
_ACTS = {
    ms.UnitAct.ASK_TO_LEAVE: "asking it to leave",
    ms.UnitAct.KILL: "killing it",
    ms.UnitAct.FORGET: "forgetting it",
    ms.UnitAct.REMOVE: "forgetting it",
}


@dataclass(frozen=True, slots=True)
class ThisNode:
    """The node of a daemon, as it is found at the daemon's start, and how it is looked at."""

    facts: NodeFacts
    address: str  # host:port of the daemon's service
    version: str  # of the daemon
    look_for_trouble: Callable[[], tuple[str, ...]] = tuple  # returns what is wrong with the node; may block
    look_for_notes: Callable[[], tuple[str, ...]] = tuple  # returns what people should see to; may block


class BlockingWork:
    """Performs the actions that may block. say: logs a line. inbox: takes the events; both are called in the threads of
    the operations. removal_kept_s: how long a removal of a job is known."""

    def __init__(
        self,
        config: AgentConfig,
        node: ThisNode,
        store: Store,
        runner: UnitRunner,
        say: Callable[[str], None],
        odd: OddRecords,
        inbox: Callable[[ms.Event], None],
        removal_kept_s: float,
    ) -> None:
        self._config = config
        self._this_node = node
        self._store = store
        self._runner = runner
        self._say = say
        self._odd = odd
        self._inbox = inbox
        self._removal_kept_s = removal_kept_s
        self.folders = UnitFolders(units_folder(config.directories_state))
        self._logs = KeptLogs(
            owners_folder(config.directories_state), Path(config.directories_log), config.node_name
        )
        self._hands = Background("bagua-hands")
        self._looks = Background("bagua-looks")

    def stop(self) -> None:
        """Waits for the operation under way, and for a look at the node for a moment."""
        self._hands.stop()
        self._looks.stop(LOOK_STOP_S)

    def perform(self, action: ms.Action) -> None:
        """Begins an action, and returns at once."""
        match action:
            case ms.LookForUnits():
                self._by_hand("looking for units", self._look)
            case ms.LookAtNode():
                self._looks.run("looking at the node", self._look_at_node, self._looked)
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
            case _:
                raise AssertionError(f"{action!r} does not block")

    def _by_hand(self, what: str, operation: Callable[[], ms.Event | None]) -> None:
        """Runs an operation that may block in the other thread. Its event comes to the inbox, NotDone if it raises."""

        def ended(end: OperationEnd[ms.Event | None]) -> None:
            event = ms.NotDone(f"{what} failed: {end.reason}") if isinstance(end, Failed) else end.value
            if event is not None:
                self._inbox(event)

        self._hands.run(what, operation, ended)

    def _look_at_node(self) -> ms.NodeSeen:
        return ms.NodeSeen(self._this_node.look_for_trouble(), self._this_node.look_for_notes())

    def _looked(self, end: OperationEnd[ms.NodeSeen]) -> None:
        self._inbox(ms.LookFailed(end.reason) if isinstance(end, Failed) else end.value)

    def _look(self) -> ms.UnitsSeen:
        found = tuple(self._runner.found())
        return ms.UnitsSeen(found, self.folders.reasons())

    def _act_on_unit(self, job_id: str, act: ms.UnitAct) -> ms.UnitsSeen | ms.ActFailed:
        try:
            self._do_to_unit(job_id, act)
        except InfrastructureLost as error:
            may_be_done = isinstance(error, OutcomeUnknown)
            if act is ms.UnitAct.ASK_TO_LEAVE and not may_be_done:
                self.folders.unmark_asked(job_id)
            return ms.ActFailed(job_id, act, f"job {job_id}: {_ACTS[act]} failed: {error}", may_be_done)
        return self._look()

    def _do_to_unit(self, job_id: str, act: ms.UnitAct) -> None:
        match act:
            case ms.UnitAct.ASK_TO_LEAVE:
                try:
                    self.folders.mark_asked(job_id)
                except OSError as error:
                    # a full disk must not keep it here; at worst a later daemon asks again
                    self._say(f"job {job_id}: that it is asked to leave was not noted: {error}")
                self._runner.ask_to_leave(job_id)
            case ms.UnitAct.KILL:
                self._runner.kill(job_id)
            case ms.UnitAct.FORGET | ms.UnitAct.REMOVE:
                self._runner.forget(job_id)
                if act is ms.UnitAct.REMOVE:
                    self.folders.remove(job_id)

    def _start(self, start: ms.StartUnit) -> None:
        submission, job_id = start.submission, start.submission.job_id

        def begin() -> float:
            request = unit_request(
                submission, start.slots, self._config, have_gpus=self._this_node.facts.gpus > 0
            )
            timeout_s = request.config.shutdown_timeout_s
            nonce = nonce_of(submission)
            self._logs.begin(job_id, nonce)
            note = UnitNote(start.order, start.slots, start.failures, timeout_s, nonce, time.time())
            self._runner.start(job_id, self.folders.make(request, note))
            return timeout_s

        def ended(end: OperationEnd[float]) -> None:
            match end:
                case Failed(UserError() as error):
                    self._inbox(ms.StartRefused(job_id, str(error)))
                case Failed(error) if end.is_bug and not isinstance(error, OSError):
                    # It must not be tried for good: what raised may lie in the submission.
                    why = f"a bug in this daemon raised {type(error).__name__}; its log has the traceback"
                    self._inbox(ms.StartRefused(job_id, why))
                case Failed():
                    self._inbox(ms.Started(job_id, None, f"job {job_id} was not started: {end.reason}"))
                case Succeeded(timeout_s):
                    self._inbox(ms.Started(job_id, timeout_s))

        self._hands.run(f"starting job {job_id}", begin, ended)

    def _remove_logs(self, job_id: str, nonce: str) -> None:
        if self._logs.remove(job_id, nonce):
            self._say(f"job {job_id} was removed, and its logs here with it")

    def _tidy_logs(self, known: frozenset[tuple[str, str]]) -> None:
        removed, refused = self._logs.tidy(known, self._removal_kept_s, time.time())
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
