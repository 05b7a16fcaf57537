"""The agent's loop: joins the job, takes messages from the inbox, passes each to the responsible part, and ends.

All changes of the agent's state happen in this one thread; operations that wait (store, probes, exits) run in other
threads and report through the inbox. membership_driver.py and apply_changes.py handle the job's membership,
worker_lifecycle.py is the interface to this node's workers, and node_ending.py decides when this node is done.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from bagua_agent.autotune.messages import Recalled, Suggested
from bagua_agent.base.errors import InfrastructureLost, InternalError, JobReplaced
from bagua_agent.base.failpoints import Failpoints
from bagua_agent.base.messages import HealthAsked, HelperFailed, SignalCame, WorkerExited
from bagua_agent.base.signals import SignalsToInbox
from bagua_agent.base.sizes import ANY_SIZE
from bagua_agent.config.job_config import JobConfig, launcher_variables
from bagua_agent.etcd.leased_keys import KeepingEnded, LeaseGranted, LeaseLapsed, StoreAway, StoreBack
from bagua_agent.etcd.mirror import Change
from bagua_agent.history import job_history
from bagua_agent.job.assembly import Joining, assemble, lifecycle_of_workers, node_parts
from bagua_agent.job.batching import InboxReader
from bagua_agent.job.create_or_join import find_job, key_pair_is_current, size_policy_of
from bagua_agent.job.loop_watch import LoopWatch, stuck_line
from bagua_agent.job.messages import (
    Gathered,
    KeyPairReplaced,
    LeadershipReported,
    LeaseChanged,
    ScopeFollowed,
    StoreChanged,
    StoreConnected,
    WorkerSaid,
)
from bagua_agent.job.open_store import JobStore, is_exposed, known_defect, open_store
from bagua_agent.job.picture import NO_WORKERS, picture_of, worker_picture
from bagua_agent.job.shutdown import flush_final_writes, remove_key_pair, take_signals, wait_for_followers
from bagua_agent.job.store_outage import StoreOutage
from bagua_agent.job.watching import Watching
from bagua_agent.job_state import console
from bagua_agent.job_state.perform_effects import ChangePerformer
from bagua_agent.job_state.store_lines import store_opened
from bagua_agent.leadership.reports import ProbeResult
from bagua_agent.membership.formation.departure import Prospect, prospect
from bagua_agent.metrics.job_picture import JobPicture, PictureAsked, WorkerPicture, how_it_ended
from bagua_agent.node.node_address import node_address
from bagua_agent.node.node_ending import Ending, EndingSituation, how_it_ends, result_grace_s
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.runtime_directory import store_directory
from bagua_agent.node.script.script_mode import Mode
from bagua_agent.node.stop_signals import Reaction, reaction
from bagua_agent.node.torchrun.launcher_error_file import write_result

KEY_WRITTEN_WITHIN_S = 0.2  # in one attempt; others' writes wait meanwhile


class JobLoop:
    def __init__(
        self,
        config: JobConfig,
        agent_id: str,
        node_name: str,
        address: str,
        directory: Path,
        workers: NodeWorkers,
        inbox: queue.SimpleQueue[object],
        signals: SignalsToInbox,
        mode: Mode,
        watching: Watching | None = None,
        on_event: Callable[[str, bytes], object] = lambda key, value: None,
        on_last_picture: Callable[[JobPicture], object] = lambda picture: None,
    ) -> None:
        """Makes the node's parts; `run` joins the job. on_event: gets the events of the job that this agent writes,
        with their keys. on_last_picture: gets the picture of the job at this node's end, with the last one of each
        worker that has exited."""
        self._config = config
        self._watching = watching
        self._on_event = on_event
        self._on_last_picture = on_last_picture
        self._mode = mode
        self._signals = signals
        self._agent_id = agent_id
        self._address = address
        self._directory = directory
        self._workers = workers
        self._inbox = inbox
        self._opened = ExitStack()
        self._node = node_parts(config, agent_id, node_name, directory, workers, inbox, self._opened)
        self._terminal = self._node.terminal
        self._outage = StoreOutage()
        self._signals_taken: list[int] = []
        self._signalled_at_end = False  # while workers ended: this node does not wait for others then
        self._exits: Counter[tuple[int, str]] = Counter()  # of workers here, by slot and how_it_ended
        self._ended_workers: dict[int, WorkerPicture] = {}  # the last of each slot
        self._reader = InboxReader(inbox, self._node.timers)
        self._watch = LoopWatch()
        self._failpoints = Failpoints.from_environment()

    # -- joining the job

    def run(self) -> int:
        """Joins and follows the job, and returns the exit code of this node's part. Raises BaguaError when the job
        can't be joined."""
        if not self._open_store() or not self._join():
            assert self._signals.first is not None
            self._terminal.tell("interrupted before the job was joined")
            return 128 + self._signals.first
        self._lifecycle.begin()
        self._membership.follow_leader(time.monotonic())
        self._watch.start(
            self._is_stuck,
            lambda failed: self._terminal.tell(f"the watch over this agent's loop failed: {failed.reason}"),
        )
        self._opened.callback(self._watch.stop)
        while (ending := self._ending()) is None:
            self._take(self._reader.next())
            self._watch.turned()
        self._watch.stop()
        return self._end(ending)

    def _is_stuck(self, is_first: bool) -> None:
        """Gives up the lead, which the lease would keep while the loop waits. is_first: in this wait.

        Runs in the watch's thread: the loop's own state follows when it sees the key gone."""
        self._job.leased.remove(self._job.keys.leader)
        if is_first:
            self._terminal.tell(stuck_line(alone=self._seen.nodes <= 1))

    def _open_store(self) -> bool:
        """Opens the store. Returns False if a signal came first."""
        config = self._config
        opened = open_store(
            config,
            self._address,
            store_directory(self._directory),
            lambda: self._signals.first is not None,
            self._terminal.tell,
            self._terminal.show,
        )
        if opened is None:
            return False
        self._job_store: JobStore = opened
        self._opened.callback(opened.close)
        if not self._address:  # the store's name was not known before
            self._address = node_address(config, hosts_store=opened.server is not None)
            self._workers.bind_host = self._address
        if opened.server is not None:
            opened.server.keep_up(self._workers.guard_group, self._terminal.tell)
        exposed, defect = is_exposed(config), known_defect(opened)
        for line in store_opened(config, opened.endpoint, self._hosts_for_others, exposed, defect):
            self._terminal.tell(line)
        return True

    @property
    def _hosts_for_others(self) -> bool:
        return self._job_store.server is not None and self._config.max_nodes > 1

    def _join(self) -> bool:
        """Finds or writes the job, and puts this agent's key. Returns False if a signal came first."""
        config, node, store = self._config, self._node, self._job_store.store
        found = find_job(store, node.keys, config, node.node_name, self._mode, self._signals)
        if found is None:
            return False
        if found.before is not None:
            self._terminal.tell(console.ended_before(config.job_id, found.before, config.checkpoint_dir))
        if config.size_policy not in (ANY_SIZE, policy := size_policy_of(found.spec)):
            self._terminal.tell(console.other_sizes(config.job_id, policy.text))
        joining = Joining(
            store,
            self._address,
            found,
            self._opened,
            self._hosts_for_others,
            dashboard="" if self._watching is None else self._watching.address,
            on_event=self._on_event,
            is_stuck=lambda: self._watch.is_stuck,
        )
        self._agent = agent = assemble(node, joining)
        self._job, self._seen = agent.job, agent.job.seen
        self._membership, self._scope, self._own_key = agent.membership, agent.scope, agent.own_key
        self._lifecycle = lifecycle_of_workers(node, agent)
        self._changes = ChangePerformer(
            self._job,
            self._lifecycle,
            self._membership.follow_leader,
            self._job.leased.recheck,
            self._become_live,
            agent.hang_orders.take,
        )
        self._membership.on_silent_mate = lambda agent_id, now_s: self._lifecycle.lost_touch(agent_id, now_s)
        self._membership.on_cut_off = self._own_key.cut_off
        self._own_key.put()
        # of a large job's nodes the generations tell enough
        if found.nodes <= agent.limits.whole_picture_nodes:
            self._job.history.own(job_history.node_joined(self._agent_id, config.slots))
        agent.subscription.start()
        self._opened.callback(agent.subscription.stop)
        if self._watching is not None:
            self._watching.joined(store)
            self._opened.callback(self._watching.left)
        return True

    def _become_live(self) -> None:
        """Changes to live mode: a worker somewhere has opened a session, so from now on no worker starts again for a
        new generation."""
        self._terminal.tell("the script follows membership in its process: workers stay from now on")
        self._lifecycle = lifecycle_of_workers(self._node, self._agent)
        self._changes.follow_with(self._lifecycle)
        self._lifecycle.begin()

    # -- the loop

    def _take(self, message: object) -> None:
        now_s = time.monotonic()
        match message:
            case None:
                pass
            case WorkerSaid():
                self._lifecycle.said(message.worker_id, message.message, now_s)
                if (tuner := self._agent.tuner) is not None:
                    tuner.said(message.worker_id, message.message, now_s)
            case WorkerExited():
                if (worker := self._workers.get(message.worker_id)) is not None:
                    self._exits[worker.slot, how_it_ended(message.returncode)] += 1
                    ended = worker_picture(self._job, self._workers, self._lifecycle, message.worker_id)
                    if ended is not None:
                        self._ended_workers[worker.slot] = ended
                self._failpoints.reach("worker-end.before")
                self._lifecycle.exited(message.worker_id, message.returncode, now_s)
            case Gathered():
                self._take_gathered(message, now_s)
            case StoreConnected():
                leading = self._membership.leading
                self._membership.store_answers = message.connected
                self._outage.changed(message.connected, now_s, self._job, leading=leading)
            case LeaseChanged():
                match message.event:
                    case LeaseLapsed():
                        self._agent.lost_keys.own_keys_lost(now_s)
                        self._membership.follow_leader(now_s)
                    case LeaseGranted():
                        self._job.writes.until_done("key pair", self._look_at_key_pair)
                    case StoreAway(reason):
                        self._outage.keys_away(reason, now_s, self._job)
                    case StoreBack():
                        self._outage.keys_back(self._job)
                    case KeepingEnded(reason):
                        self._outage.keeping_ended(reason, self._job)
            case KeyPairReplaced():
                self._key_pair_replaced()
            case LeadershipReported():
                self._scope.reported(message, now_s)
            case Suggested() if (tuner := self._agent.tuner) is not None:
                tuner.suggested(message, now_s, leads=self._membership.leading)
            case Recalled() if (tuner := self._agent.tuner) is not None:
                tuner.recalled(message, now_s, leads=self._membership.leading)
            case ScopeFollowed():
                self._scope.followed(message, now_s)
            case HealthAsked():
                message.answered.set()
            case PictureAsked():
                message.answer.put(self._picture(now_s))
            case SignalCame():
                self._signalled(message.number, now_s)
            case HelperFailed():
                raise InternalError(
                    f"{message.what} failed: {message.reason}; this node can't go on with the job, start it again"
                )
            case _:
                raise AssertionError(f"unexpected message {message!r}")
        for due in self._node.timers.take_due(now_s):
            due(now_s)
        self._outage.follow_steps(self._job, awaits_generation=self._lifecycle.awaits_generation)

    def _picture(self, now_s: float, ended: Mapping[int, WorkerPicture] = NO_WORKERS) -> JobPicture:
        tuner = self._agent.tuner
        return picture_of(
            self._job,
            self._workers,
            self._lifecycle,
            self._outage,
            self._exits,
            leads=self._membership.leading,
            now_s=now_s,
            study=tuner.study if tuner is not None and tuner.is_on and self._membership.leading else None,
            ended=ended,
        )

    def _look_at_key_pair(self) -> None:
        """Checks the job's key pair: the last agent that left may have removed it before this agent's key was in etcd.
        Runs in the writes' thread; raises InfrastructureLost if it has to run again."""
        job = self._job
        if not job.leased.flush(KEY_WRITTEN_WITHIN_S):
            raise InfrastructureLost("this agent's key does not stand yet")
        if not key_pair_is_current(job.store, job.keys, job.seen.spec.nonce, self._agent.identity):
            self._inbox.put(KeyPairReplaced())

    def _key_pair_replaced(self) -> None:
        reason = "agents that came meanwhile made another key pair for the job"
        if not self._seen.commit_is_known:
            raise JobReplaced(reason)
        # This node may hold the job's state. Its lease tells the others whether it lives, as theirs tell it.
        self._terminal.tell_once(
            "key pair", f"{reason}: whether their hosts live shows only when leases end; training goes on"
        )

    def _take_gathered(self, gathered: Gathered, now_s: float) -> None:
        self._take_changes(tuple(gathered.changes), tuple(gathered.probes), now_s)
        self._reader.decided(now_s, self._agent.limits, len(self._seen.view.agents))

    def _take_changes(
        self, changes: tuple[Change, ...], probes: tuple[ProbeResult, ...], now_s: float
    ) -> None:
        self._seen.take_keepers(self._agent.records.keepers)
        judges = not self._scope.too_little_to_judge()
        if judges:
            self._agent.lost_keys.notice(changes, now_s)
        happened = self._changes.take(changes, now_s) + self._membership.answers(probes, now_s)
        if happened:
            self._membership.advance(*happened)
            if self._seen.replica_size > 1:
                self._lifecycle.follow_replicas(now_s)
                self._membership.follow_replicas(now_s)
        if any(c.key == self._job.keys.stop and c.value is not None for c in changes):
            self._asked_to_stop(now_s)
        if judges:
            self._agent.lost_keys.mend(changes, now_s)
        self._job.history.saw(changes)
        if (tuner := self._agent.tuner) is not None:
            tuner.saw(changes, now_s, leads=self._membership.leading)
        self._scope.look_around()

    def _store_changed(self, message: StoreChanged, now_s: float) -> None:
        self._take_changes(message.changes, (), now_s)

    # -- leaving and ending

    def _signalled(self, number: int, now_s: float) -> None:
        called_for = self._reaction_to(number)
        if called_for is Reaction.LEAVE:
            self._leave(number, now_s)
        elif called_for is Reaction.KILL:
            self._seen.leave_at_once()

    def _reaction_to(self, number: int) -> Reaction:
        """Returns what the caller has to do after the signal: LEAVE, KILL or GO_ON."""
        called_for = reaction(self._signals_taken, number, is_unit=bool(self._config.submission))
        if called_for is Reaction.GO_ON:
            self._terminal.tell(f"{signal.Signals(number).name} while leaving; the leave goes on")
            return called_for
        self._signals_taken.append(number)
        if called_for is not Reaction.INTERRUPT:
            return called_for
        if not self._workers.worker_ids:
            return Reaction.KILL
        self._terminal.tell("SIGINT to the workers, in the middle of a step; another signal kills them")
        self._lifecycle.interrupt()
        return Reaction.GO_ON

    def _are_to_be_killed(self, changes: list[StoreChanged]) -> bool:
        """Tells whether a signal says so to workers that end with the job. The first one asks for what they do."""
        for number in take_signals(self._inbox, changes):
            self._signalled_at_end = True
            called_for = self._reaction_to(number)
            if called_for is Reaction.KILL:
                return True
            if called_for is Reaction.LEAVE:
                name = signal.Signals(number).name
                self._terminal.tell(f"{name}: the workers here were asked to end{self._next(number)}")
        return False

    def _asked_to_stop(self, now_s: float) -> None:
        """Handles `bagua-launch stop` as the first SIGTERM. Never as a second one: the first leave has its time."""
        if self._seen.leaving_since_s is None and not self._signals_taken:
            self._terminal.tell("the job is asked to stop (bagua-launch stop)")
            self._signalled(signal.SIGTERM, now_s)

    def _leave(self, number: int, now_s: float) -> None:
        seen = self._seen
        seen.begin_leave(now_s, number, self._config.shutdown_timeout_s)
        self._own_key.leaving()
        self._job.history.own(job_history.node_leaving(self._agent_id))
        when = self._lifecycle.leave()
        self._terminal.tell(f"leaving {when}{self._next(number)}")
        if not self._lifecycle.ready_workers:
            seen.leave_at_once()  # nothing has begun here, so there is nothing to wait for

    def _next(self, number: int) -> str:
        """Returns what a second signal would cause, as the end of a line."""
        if self._config.submission:
            return ""
        by_hand = number == signal.SIGINT
        return "; a second Ctrl-C interrupts the script" if by_hand else "; a second signal ends it at once"

    def _ending(self) -> Ending | None:
        now_s, seen = time.monotonic(), self._seen
        left = self._prospect() if seen.leaving_since_s is not None else Prospect(False, False, "")
        return how_it_ends(
            EndingSituation(
                workers_running=len(self._workers.worker_ids),
                result=None if seen.result is None else (seen.result.outcome, seen.result.exit_code),
                closed=seen.closing,
                leaving_signal=seen.leaving_signal,
                leaving_for_s=None if seen.leaving_since_s is None else now_s - seen.leaving_since_s,
                leave_known=seen.leave_is_known(self._agent_id),
                shutdown_timeout_s=self._config.shutdown_timeout_s,
                job_goes_on=left.goes_on and seen.result is None,
                awaits_result=left.awaits_result,
                prospect=left.text,
                trained=self._lifecycle.trained,
                store_away_for_s=self._outage.away_for_s(now_s),
                own_exit_code=self._lifecycle.exit_code,
                restart_mode=seen.restarts,
            )
        )

    def _prospect(self) -> Prospect:
        """Returns what becomes of the job without this node."""
        return prospect(
            self._seen.view,
            self._agent_id,
            others_stay=self._seen.others_stay(self._agent_id),
            ends_when_all_leave=self._config.ends_when_all_leave,
        )

    def _end(self, ending: Ending) -> int:
        self._job.change_lines.say_held()
        self._on_last_picture(self._picture(time.monotonic(), self._ended_workers))
        changes: list[StoreChanged] = []
        if ending.end_workers_within_s is not None:
            self._workers.end_all(ending.end_workers_within_s, lambda: self._are_to_be_killed(changes))
        if self._seen.result is not None:
            write_result(
                launcher_variables(self._config, os.environ), self._seen.result, self._workers.error_file_of
            )
            for line in console.result(self._config.job_id, self._seen.result, self._workers.shows_errors_of):
                self._terminal.tell(line)
        elif ending.reason:
            self._terminal.tell(ending.reason)
        self._node.sessions.stop()
        if self._outage.connected:
            flush_final_writes(self._job)
            if self._seen.result is None:
                # another agent may leave in the same moment: the last one finds no other's key
                self._own_key.remove()
                remove_key_pair(self._job)
            if self._hosts_for_others and not self._signalled_at_end:
                grace_s = result_grace_s(self._config.shutdown_timeout_s, restart_mode=self._seen.restarts)
                wait_for_followers(self._job, self._inbox, self._store_changed, changes, grace_s)
        return ending.exit_code

    def close(self) -> None:
        """Closes everything that `run` and the constructor opened, last first, whatever fails on the way."""
        self._opened.close()
