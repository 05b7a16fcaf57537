"""Carries out what the records of replicas mean for this node's workers, in live mode.

Passes a worker its replica, asks it to leave with a node that holds another part, and kills it when its replica is
over. membership/formation/replicas.py decides; a worker is killed only for a written `over`, or because this node saw
another worker of the replica end, or can't reach another's host. The slots of killed workers are started again like
any others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bagua_agent.base.backoff import delay_s
from bagua_agent.job_state import console
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership.failures.root_cause import NO_ANSWER, REPLICA_OVER
from bagua_agent.membership.replica_groups import groups
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.rpc.session_server import SessionServer
from bagua_contract.replica import Replica

# Of the first replica that a cut between two hosts ends, and of later ones: a host that was only frozen comes back.
FIRST_PATIENCE_S, LONGEST_PATIENCE_S = 1.0, 60.0
FORGOTTEN_AFTER_S = 600.0  # much longer than the longest patience: see lost_touch


@dataclass(slots=True)
class _Cuts:
    """Counts the replicas that `lost_touch` ended because of one agent, and holds when it was last silent."""

    ended: int  # replicas with a part there that `lost_touch` ended
    silent_s: float  # when it last did not answer


class ReplicasHere:
    """Applies the records of replicas to this node's workers. on_assembled(replica): workers here are in it.
    leave_within_s: how long a worker has that leaves because another node does."""

    def __init__(
        self,
        job: JoinedJob,
        workers: NodeWorkers,
        sessions: SessionServer,
        leave_within_s: float,
        on_assembled: Callable[[Replica], None],
    ) -> None:
        self._job = job
        self._workers = workers
        self._sessions = sessions
        self._leave_within_s = leave_within_s
        self._on_assembled = on_assembled
        self._replica_of: dict[str, Replica] = {}  # of workers here
        self._began_s: dict[str, float] = {}  # by replica
        self._cuts: dict[str, _Cuts] = {}  # by agent; forgotten as `lost_touch` says
        self._ended_by_cut: set[str] = set()  # replicas with workers here that were killed for a cut
        self._leave_by_s: dict[
            str, float
        ] = {}  # workers here that leave with another node, with their deadlines

    def look(self, now_s: float) -> None:
        """Does what the picture calls for now. Calling it twice does no harm."""
        for replica in groups(self._job.seen.view).records.values():
            here = [w for w in replica.worker_ids if self._workers.get(w) is not None]
            if not here:
                continue
            if here[0] not in self._replica_of:
                self._begin(replica, here)
                self._began_s[replica.replica_id] = now_s
            if replica.over:
                self._end(replica, here, now_s)
            else:
                self._leave_with_others(replica, here, now_s)

    def _begin(self, replica: Replica, here: list[str]) -> None:
        for worker_id in here:
            self._replica_of[worker_id] = replica
        if replica.over:
            return
        # etcd may lose it while they live
        self._job.seen.remember(self._job.keys.replica(replica.replica_id), replica.encode())
        self._on_assembled(replica)
        self._sessions.tell_replica(replica, here)
        self._job.terminal.tell(console.replica_assembled(replica))

    def _end(self, replica: Replica, here: list[str], now_s: float) -> None:
        seen = self._job.seen
        seen.forget(self._job.keys.replica(replica.replica_id))
        if seen.leaving_since_s is not None:
            return  # its workers leave in their time, and may still write their parts of the last checkpoint
        leaves = any(w in seen.view.departures for w in replica.worker_ids)
        self._job.terminal.tell_once(f"replica of {here[0]}", console.replica_over(replica, len(here)))
        for worker_id in here:
            due_s = self._leave_by_s.get(worker_id)
            if due_s is not None and leaves and now_s < due_s:
                # it may still write its part of the last checkpoint
                self._job.timers.set(f"leave {worker_id}", due_s, self.look)
            else:
                self._workers.kill(worker_id, f"{REPLICA_OVER}: {replica.over}")

    def _leave_with_others(self, replica: Replica, here: list[str], now_s: float) -> None:
        """Asks the workers here to leave if another node of their replica leaves. This node may stay, but the replica
        can't go on without the parts on the node that leaves."""
        agents = self._job.seen.view.agents
        leaving = [
            m.node_name
            for m in replica.members
            if m.agent_id != self._job.agent_id and m.agent_id in agents and agents[m.agent_id].leaving
        ]
        asked = [w for w in here if w not in self._leave_by_s] if leaving else []
        if asked:
            self._leave_by_s.update(dict.fromkeys(asked, now_s + self._leave_within_s))
            self._sessions.tell_leave(self._leave_within_s, worker_ids=asked)
            self._job.terminal.tell(console.replica_leaves(replica, leaving[0], len(asked)))

    def lost_touch(self, agent_id: str, now_s: float) -> None:
        """Ends the parts here of replicas that agent_id has a part in, since its host has not answered this one for a
        second and a half. These parts wait in collectives of their replica, which report nothing, so they are ended;
        the others' part ends by their agent's word, or as a loss. Called again in each round of touches while the host
        is silent; a replica is ended once.

        A young replica is spared for a while, as its hosts may have formed it across a cut that comes and goes. Each
        attempt has twice the time of the one before, up to LONGEST_PATIENCE_S, so that one outlives such a cut. An
        answer alone changes nothing: a link that fails again after each answer would end replicas without end. Once the
        host has not been silent for FORGOTTEN_AFTER_S, the next attempt is a first one: on a link that works for so
        long a replica reaches an age at which no patience counts.
        """
        self._cuts = {a: c for a, c in self._cuts.items() if now_s - c.silent_s <= FORGOTTEN_AFTER_S}
        cuts = self._cuts.get(agent_id, _Cuts(0, now_s))
        cuts.silent_s = now_s
        patience_s = delay_s(cuts.ended + 1, FIRST_PATIENCE_S, LONGEST_PATIENCE_S)
        here = {r.replica_id for r in self._replica_of.values() if agent_id in r.agent_ids}
        ids = here - self._ended_by_cut
        for replica in [r for r in groups(self._job.seen.view).records.values() if r.replica_id in ids]:
            if replica.over or now_s < self._began_s[replica.replica_id] + patience_s:
                continue
            cuts.ended += 1
            self._cuts[agent_id] = cuts
            self._ended_by_cut.add(replica.replica_id)
            other = next(m.node_name for m in replica.members if m.agent_id == agent_id)
            why = f"{other} {NO_ANSWER}"
            self._job.terminal.tell(console.replica_cut(replica, other))
            for worker_id in replica.worker_ids:
                if worker_id in self._replica_of:
                    self._workers.kill(worker_id, f"{REPLICA_OVER}: {why}")

    def greet(self, worker_id: str) -> None:
        """Sends a worker with a new session its replica, and the request to leave if there is one."""
        replica = self._replica_of.get(worker_id)
        if replica is not None:
            self._sessions.tell_replica(replica, [worker_id])
        if worker_id in self._leave_by_s:
            left_s = max(0.0, self._leave_by_s[worker_id] - time.monotonic())
            self._sessions.tell_leave(left_s, worker_ids=[worker_id])

    def leaves_alone(self, worker_id: str) -> bool:
        """Tells whether the worker was asked to leave though its node stays."""
        return worker_id in self._leave_by_s

    def ended(self, worker_id: str, *, unexpected: bool) -> None:
        """Handles the end of a worker here. unexpected: its replica is over, whatever the leader knows by now."""
        self._leave_by_s.pop(worker_id, None)
        self._job.timers.cancel(f"leave {worker_id}")
        replica = self._replica_of.pop(worker_id, None)
        if replica is None:
            return
        others = [w for w in replica.worker_ids if w in self._replica_of]
        if not others:
            self._began_s.pop(replica.replica_id, None)
            self._ended_by_cut.discard(replica.replica_id)
            self._job.seen.forget(self._job.keys.replica(replica.replica_id))
        for other in others if unexpected else ():
            self._workers.kill(other, f"{REPLICA_OVER}: another worker of it on this node has ended")
