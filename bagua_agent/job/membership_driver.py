"""Gives events to the pure membership machine and performs the actions that it returns.

Owns this agent's part in leading: candidacy, and the meaning of the answers to a leader's acts. Decides nothing:
membership/state_machine/machine.py forms generations. Does not know workers and processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from bagua_agent.job_state.context import JoinedJob
from bagua_agent.large_jobs.limits import USUAL_LIMITS, Limits
from bagua_agent.leadership.host_watch import ROUND_S, HostWatch
from bagua_agent.leadership.leader_probe import DeadLeader, LeaderWatch
from bagua_agent.leadership.leadership import Leadership
from bagua_agent.leadership.replica_peers import ReplicaPeers
from bagua_agent.leadership.reports import (
    Act,
    Elected,
    GenerationRefused,
    NotElected,
    ProbeFailed,
    ProbeResult,
    Report,
    Touched,
    WriteFailed,
    Written,
)
from bagua_agent.membership import actions as do
from bagua_agent.membership import ended_before_joining, spare_wait
from bagua_agent.membership import events as ev
from bagua_agent.membership.failures.root_cause import casualties_line, of_one_time, root_cause
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.replica_groups import groups
from bagua_agent.membership.state_machine.machine import State, new_state, step_all
from bagua_agent.membership.view import FailureView
from bagua_agent.rpc.reachability import Reachability
from bagua_agent.workers.exits.exit_cause import shell_exit_code
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import read_message

STAND_AGAIN_S = 0.5
STAND_AFTER_RESIGNING_S = 10.0  # the others stand meanwhile; what this agent met may have been mended by then
# By their first words, the reasons worth a line once they have lasted so long. Most waits are over before they are
# read; a script may do much before its loop, and something after its last step.
TOLD_AFTER_S = {"waiting": 2.0, "closing": 30.0, "before the loop": 60.0}


class JobMembership:
    """This agent's part in the job's membership. stored(key): the value in the store, as far as this agent has read it.
    stands_after_s(now_s): how long to wait before standing for election."""

    def __init__(
        self,
        job: JoinedJob,
        policy: Policy,
        leadership: Leadership,
        control_address: str,
        stored: Callable[[str], bytes | None],
        stands_after_s: Callable[[float], float] = lambda now_s: 0.0,
        has_checkpoints: bool = False,
        limits: Limits = USUAL_LIMITS,
    ) -> None:
        self._limits = limits
        # workers here can't go on: since when, and when that was last told
        self._in_trouble_s = (float("-inf"), float("-inf"))
        self._job = job
        self._policy = policy
        self._leadership = leadership
        self._control_address = control_address
        self._stored = stored
        self._stands_after_s = stands_after_s
        self._leader_watch = LeaderWatch(leadership.probes, policy.probe_window_s, self._leader_is_dead)
        self.store_answers = True  # the watch of etcd is up
        self._told_dead = ""  # the leader whose end was told
        self._host_watch = HostWatch(job.agent_id)
        self._touching_since_s: float | None = None  # a round is under way
        self._replica_peers = ReplicaPeers(job.agent_id)
        # agent_id, now_s: an agent that holds a part of a replica of this node does not answer this host
        self.on_silent_mate: Callable[[str, float], None] = lambda agent_id, now_s: None
        # agents whose hosts do not answer this one, of those that hold parts of this node's replicas, or did
        self.on_cut_off: Callable[[frozenset[str]], None] = lambda agent_ids: None
        spec = job.seen.spec
        self._state: State = new_state(
            job.agent_id,
            spec.nonce,
            has_checkpoints=has_checkpoints,
            restarts=job.seen.restarts,
            replica_size=job.seen.replica_size,
        )
        self._wait = ""
        self._stands_not_before_s = float("-inf")
        self._leads_since = 0  # create revision of the leader's key, as this agent last won it

    @property
    def leading(self) -> bool:
        return self._state.leading

    # -- the machine

    def advance(self, *happened: ev.Event) -> None:
        """Gives events to the machine and performs what follows."""
        if not happened:
            return
        result = step_all(self._state, happened, self._policy)
        self._state = result.state
        self._job.seen.take_view(result.state.view)
        self._narrate_wait(result.reason if self._state.leading else self._waits_in_vain())
        for action in result.actions:
            self._perform(action)

    def _waits_in_vain(self) -> str:
        """Returns what an agent reports that does not lead; empty if nothing."""
        if self._state.ended:
            return ""
        seen = self._job.seen
        if early := ended_before_joining.expected(seen.view, self._policy):
            return f"waiting: {early}"
        # with a reduced subscription the other spares are unknown
        return spare_wait.described(seen.view, self._job.agent_id, self._state.now_s) if seen.whole else ""

    def _narrate_wait(self, reason: str) -> None:
        """Prints what the job waits for, if it still does after a while."""
        timers, tell = self._job.timers, self._job.terminal
        kind = next((words for words in TOLD_AFTER_S if reason.startswith(words)), "")
        if not kind or not self._wait.startswith(kind):
            timers.cancel("wait")
        self._wait = reason
        if kind:
            at_s = time.monotonic() + TOLD_AFTER_S[kind]
            timers.set_once("wait", at_s, lambda _: tell.tell_once("wait", self._wait))

    def _perform(self, action: do.Action) -> None:
        match action:
            case do.WriteGeneration():
                self._job.terminal.forget("wait")  # a later wait for the same nodes is another
                self._leadership.writes.write_generation(
                    action.generation,
                    self._job.seen.generation_revision
                    if action.expected_previous_number
                    else self._job.seen.unreadable.get(self._job.keys.generation, 0),
                    self._job.seen.unwritten(self._job.keys.result),
                    {a.agent_id: a.control_address for a in self._state.view.agents.values()},
                )
            case do.WriteResult():
                failure = self._failure_record(action.failure)
                exit_code = action.exit_code if failure is None else shell_exit_code(failure.exit_code)
                casualties = self._casualties(action.failure)
                unwritten = self._job.seen.unwritten(self._job.keys.result)
                self._leadership.writes.write_result(
                    unwritten, action.outcome, exit_code, action.reason, failure, casualties
                )
            case do.ProbeAgents():
                for question in action.questions:
                    self._leadership.probes.ask(question, action.sequence)
            case do.RefuseMember():
                self._leadership.writes.refuse(action.worker_id, action.difference)
            case do.WriteHangOrder():
                self._leadership.writes.write_hang_order(action.order)
            case do.WriteReplicas():
                self._leadership.writes.write_replicas(action.replicas, action.forgotten)
            case do.RemoveDeadAgent():
                ids = self._members_of(action.agent_id)
                self._leadership.writes.remove_agent(action.agent_id, action.join_revision, ids)
            case do.WakeAt():
                self._job.timers.set(
                    "machine", action.time_s, lambda now_s: self.advance(ev.TimePassed(now_s=now_s))
                )

    def _members_of(self, agent_id: str) -> list[str]:
        return [m.worker_id for m in self._state.view.members.values() if m.agent_id == agent_id]

    def _failure_record(self, failure: FailureView | None) -> pb.Failure | None:
        if failure is None:
            return None
        stored = self._stored(self._job.keys.failure(failure.worker_id))
        # None too where it was overwritten: the result does not need it
        return None if stored is None else read_message(pb.Failure, stored)

    def _casualties(self, failure: FailureView | None) -> str:
        """Returns one line about the failures that the shown one explains, as far as they are known by now."""
        if failure is None:
            return ""
        found = root_cause(of_one_time(failure, self._state.view.failures.values()))
        return casualties_line(found) if found is not None and found.casualties else ""

    # -- leading

    def follow_leader(self, now_s: float) -> None:
        """Follows the leader's key, which changed or should be looked at again."""
        leader = self._job.seen.leader
        if leader is None or leader.agent_id != self._job.agent_id:
            self._step_down(now_s)
            self._job.history.leader_is(leader.agent_id if leader is not None else None, leading=False)
        if leader is None:
            if self._job.seen.result is None:
                self._stand(now_s)
        elif leader.agent_id != self._job.agent_id:
            self._leader_watch.leader_is(leader)
        elif not self._state.leading:  # the answer to the election is on its way, or was lost
            self._job.timers.set_once("election", now_s + STAND_AGAIN_S, self._stand_again)
        self._job.timers.set_once("hosts", now_s, self._watch_hosts)

    def _stand(self, now_s: float) -> None:
        wait_s = max(self._stands_after_s(now_s), self._stands_not_before_s - now_s)
        if wait_s > 0:
            self._job.timers.set("election", now_s + wait_s, self._stand_again)
        else:
            self._stands_not_before_s = float("-inf")
            self._leadership.election.stand(self._job.agent_id, self._control_address)

    def _step_down(self, now_s: float) -> None:
        if self._state.leading:
            self._leadership.election.lost()
            self.advance(ev.LeadershipLost(now_s=now_s))

    def suspect_leader(self, now_s: float) -> None:
        """Probes the leader, since a worker can't go on. If the leader itself is lost, another agent has to notice; in
        a large job not all agents at once."""
        since_s, last_s = self._in_trouble_s
        if now_s - last_s > 2 * self._limits.next_asking_after_s:
            since_s = now_s
        self._in_trouble_s = (since_s, now_s)
        if now_s - since_s >= self._limits.turn_s(self._job.agent_id, self._job.seen.nodes):
            self._probe_leader(now_s)

    def _probe_leader(self, now_s: float) -> None:
        leader = self._state.view.agents.get(self._leader_watch.leader_id)
        revision = 0 if leader is None else leader.join_revision
        self._leader_watch.suspect(self._job.seen.relay_address(self._job.agent_id), revision, now_s)

    def follow_replicas(self, now_s: float) -> None:
        """Follows replicas, which may have changed. Agents of a new one are touched at once: only a host that has
        answered is missed, so a link that is cut before the next round would never be."""
        if self._addresses_of_peers().keys() - self._host_watch.met:
            self._job.timers.set("hosts", now_s, self._watch_hosts)

    def _watch_hosts(self, now_s: float) -> None:
        """Begins a round of touches between agents. In restart mode a worker that waits for a lost peer may report
        nothing, nor does a shard that waits in its replica's own collectives."""
        seen = self._job.seen
        watches = seen.restarts or seen.replica_size > 1
        if not watches or seen.result is not None or self._touching_since_s is not None:
            return
        if not seen.restarts:
            addresses, watchers = self._addresses_of_peers(), 1
        elif self._state.leading:
            addresses, watchers = self._others_addresses(), 1
        else:
            addresses, watchers = self._leader_watch.addresses, seen.nodes
        due = self._host_watch.next_round(addresses, watchers)
        if not seen.restarts:
            # Also where none is touched any more: an agent whose key is gone may come back
            self.on_cut_off(self._host_watch.cut_off)
        if due:
            self._touching_since_s = now_s
            self._leadership.probes.touch({agent_id: addresses[agent_id] for agent_id in due})
        else:
            self._job.timers.set("hosts", now_s + ROUND_S, self._watch_hosts)

    def _others_addresses(self) -> dict[str, str]:
        others = (a for a in self._state.view.agents.values() if a.agent_id != self._job.agent_id)
        return {a.agent_id: a.control_address for a in others}

    def _addresses_of_peers(self) -> dict[str, str]:
        view = self._state.view
        records = groups(view).records.values()
        return self._replica_peers.addresses(
            records, view.agents, whole=self._job.seen.whole, met=self._host_watch.met
        )

    def _touched(self, found: Mapping[str, Reachability], now_s: float) -> None:
        began_s, self._touching_since_s = self._touching_since_s or now_s, None
        self._job.timers.set("hosts", began_s + ROUND_S, self._watch_hosts)
        for agent_id in self._host_watch.touched(found):
            restarts = self._job.seen.restarts
            if not restarts:
                self.on_silent_mate(agent_id, now_s)
            if restarts and self._state.leading:
                self.advance(ev.AgentDoubted(now_s=now_s, agent_id=agent_id))
            elif agent_id == self._leader_watch.leader_id:
                self._probe_leader(now_s)
        if not self._job.seen.restarts:
            self.on_cut_off(self._host_watch.cut_off)

    def _leader_is_dead(self, leader: DeadLeader) -> None:
        """Removes a dead leader's keys. The next leader finds them gone and need not probe it again, which would cost
        another probe window."""
        agent = self._state.view.agents.get(leader.agent_id)
        name = leader.agent_id if agent is None else agent.node_name
        if leader.agent_id != self._told_dead:  # the next one may be of the same node, and end alike
            self._told_dead = leader.agent_id
            when = "" if self.store_answers else " once etcd answers"
            self._job.terminal.tell(
                f"the leader, {name}, {leader.how}: its keys are removed and another is elected{when}"
            )
        self._leadership.election.remove_dead_leader(
            leader.agent_id,
            leader.create_revision,
            leader.agent_revision,
            self._members_of(leader.agent_id),
        )

    def take(self, report: Report, now_s: float) -> None:
        """Handles the outcome of something that `Leadership` was asked for."""
        match report:
            case Elected() if now_s < self._stands_not_before_s:
                self._leadership.election.resign()  # won by an attempt that was under way when this node resigned
            case Elected() if self._state.leading and report.create_revision == self._leads_since:
                pass  # a second answer about the same key
            case Elected():
                self._leads_since = report.create_revision
                if self._state.leading:
                    self.advance(ev.LeadershipLost(now_s=now_s))
                self._job.terminal.tell("this node leads: it forms the generations")
                self._leader_watch.leader_is(None)
                self._job.history.leader_is(self._job.agent_id, leading=True)
                self.advance(ev.LeadershipWon(now_s=now_s, revision=report.create_revision))
            case NotElected() | Written():
                pass
            case GenerationRefused():
                self.advance(ev.GenerationWriteRefused(now_s=now_s, number=report.number, why=report.reason))
            case ProbeResult():
                self.advance(*self.answers([report], now_s))
            case Touched():
                self._touched(report.found, now_s)
            case ProbeFailed():
                self._job.terminal.tell_once(
                    "probe", f"agent {report.agent_id} could not be asked whether it lives: {report.reason}"
                )
            case WriteFailed():
                if report.ends_leading:
                    self._resign(report, now_s)
                elif report.act is Act.ELECTION:
                    self._job.timers.set("election", now_s + STAND_AGAIN_S, self._stand_again)
                elif report.act is Act.RESULT:
                    self._result_refused(report.reason, now_s)

    def _resign(self, failed: WriteFailed, now_s: float) -> None:
        """Gives up the lead, since this agent can't carry out what a leader decides: another may lead, and this one
        stands again later."""
        self._job.terminal.tell_once(
            "resigned",
            f"{failed.what} failed: {failed.reason}; this node does not lead for {STAND_AFTER_RESIGNING_S:g} s, "
            "so that another one can",
        )
        self._stands_not_before_s = now_s + STAND_AFTER_RESIGNING_S
        self._leadership.election.resign()
        self._step_down(now_s)
        self._job.timers.set("election", self._stands_not_before_s, self._stand_again)

    def _result_refused(self, why: str, now_s: float) -> None:
        if self._state.leading and self._job.seen.result is None:
            self.advance(ev.ResultWriteRefused(now_s=now_s, why=why))

    def answers(self, reports: Iterable[ProbeResult], now_s: float) -> list[ev.Event]:
        """Returns the events for the machine."""
        return [
            ev.ProbeAnswered(
                now_s=now_s,
                agent_id=report.agent_id,
                sequence=report.sequence,
                verdict=report.verdict,
                relayed=report.relayed,
                workers=report.workers,
            )
            for report in reports
            if not self._leader_watch.took(report, now_s)
        ]

    def _stand_again(self, now_s: float) -> None:
        if self._state.leading:
            return
        leader = self._job.seen.leader
        if leader is None:
            self.follow_leader(now_s)
        elif leader.agent_id == self._job.agent_id and self._job.seen.result is None:
            self._stand(now_s)  # the key is ours already: its revision is the answer
