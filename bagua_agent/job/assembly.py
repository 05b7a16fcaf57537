"""Builds an agent: the parts that its node has at once (`node_parts`), and those that need the job (`assemble`).

loop.py drives them. What is opened here is closed by the ExitStack that the caller gives, last first.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bagua_agent.base.retrying_writes import DesiredWrites
from bagua_agent.base.timers import Timers
from bagua_agent.config.job_config import JobConfig
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.history.history_keeper import HistoryKeeper
from bagua_agent.history.history_writer import HistoryWriter
from bagua_agent.job.create_or_join import JobFound, make_live
from bagua_agent.job.membership_driver import JobMembership
from bagua_agent.job.messages import LeadershipReported, LeaseChanged, WorkerSaid
from bagua_agent.job.own_answers import OwnAnswers
from bagua_agent.job.subscription import JobSubscription
from bagua_agent.job.subscription_scope import SubscriptionScope
from bagua_agent.job_state import console
from bagua_agent.job_state.change_lines import ChangeLines
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.large_jobs.kept_records import KeptRecords
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.whole_records import WholeRecords
from bagua_agent.leadership.leadership import Leadership
from bagua_agent.lost_store.lost_keys import LostKeys
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import JobView
from bagua_agent.node.hang_orders import HangOrders
from bagua_agent.node.killed_workers import KilledWorkers
from bagua_agent.node.live_workers import LiveWorkers
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.own_key import OwnKey
from bagua_agent.node.restarted_workers import RestartedWorkers
from bagua_agent.node.runtime_directory import session_socket
from bagua_agent.node.worker_lifecycle import WorkerLifecycle
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_agent.rpc.session_server import SessionServer

if TYPE_CHECKING:
    from bagua_agent.autotune.tuner import Tuner


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts that this node has before it joins the job."""

    config: JobConfig
    agent_id: str
    node_name: str
    workers: NodeWorkers
    inbox: queue.SimpleQueue[object]
    keys: JobKeys
    terminal: console.JobTerminal
    timers: Timers
    sessions: SessionServer


@dataclass(frozen=True, slots=True)
class Joining:
    """What an agent is given, or has found, when it joins its job."""

    store: Store
    address: str  # of this node, for others
    found: JobFound
    opened: ExitStack  # closes what the parts open
    hosts_store: bool  # for other nodes
    dashboard: str  # HOST:PORT at which this agent serves one; empty for none
    on_event: Callable[[str, bytes], object]  # gets the events that this agent writes, with their keys
    is_stuck: Callable[[], bool]  # whether the loop does not go on


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that has joined its job: the parts by which it takes part. subscription: not started yet. tuner: None
    for a job that is not tuned."""

    job: JoinedJob
    identity: JobIdentity
    limits: Limits
    policy: Policy
    records: WholeRecords
    subscription: JobSubscription
    lost_keys: LostKeys
    own_key: OwnKey
    membership: JobMembership
    scope: SubscriptionScope
    hang_orders: HangOrders
    tuner: Tuner | None


def node_parts(
    config: JobConfig,
    agent_id: str,
    node_name: str,
    directory: Path,
    workers: NodeWorkers,
    inbox: queue.SimpleQueue[object],
    opened: ExitStack,
) -> NodeParts:
    timers = Timers(lambda: inbox.put(None))
    socket = session_socket(directory)
    sessions = SessionServer(
        str(socket), config.slots, lambda worker_id, message: inbox.put(WorkerSaid(worker_id, message))
    )
    opened.callback(sessions.stop)
    workers.admit_to(socket)
    for worker_id in workers.worker_ids:
        sessions.expect(worker_id)
    workers.on_spawning = sessions.expect
    workers.on_not_spawned = sessions.forget
    terminal = console.JobTerminal(workers.output.say, node_name, workers.output.show_status)
    KilledWorkers(workers, timers, terminal)
    keys = JobKeys(config.job_id)
    return NodeParts(config, agent_id, node_name, workers, inbox, keys, terminal, timers, sessions)


def assemble(node: NodeParts, joining: Joining) -> Agent:
    """Builds the parts that need the job."""
    config, store, keys, found = node.config, joining.store, node.keys, joining.found
    kept, limits = KeptRecords(), Limits.from_environment()
    lease_ttl_s = limits.lease_ttl_s(config.lease_ttl_s, max(found.nodes, config.min_nodes))
    remembered = {keys.identity: found.identity.encode()}
    seen = LocalJobState(spec=found.spec, view=JobView(), remembered=remembered)
    control = _control_server(node, joining, seen, kept)
    job = _joined_job(node, joining, seen, _leased_keys(node, joining, seen, lease_ttl_s))
    records = WholeRecords(store, keys, found.identity, node.agent_id, control.address, kept, limits)
    leadership = _leadership(node, joining, job, records)
    subscription = JobSubscription(
        store,
        keys,
        node.agent_id,
        records,
        limits,
        node.inbox,
        hosts_store=joining.hosts_store,
        nodes=found.nodes,
    )
    lost_keys = LostKeys(job, subscription.state, limits, config.submission)
    policy = _policy(config, seen.failures_allowed, lease_ttl_s)
    membership = JobMembership(
        job,
        policy,
        leadership,
        control.address,
        subscription.value,
        lost_keys.settling_for_s,
        has_checkpoints=bool(config.checkpoint_dir),
        limits=limits,
    )
    return Agent(
        job,
        found.identity,
        limits,
        policy,
        records,
        subscription,
        lost_keys,
        _own_key(node, job, control.address),
        membership,
        SubscriptionScope(job, subscription, membership, lost_keys),
        _hang_orders(node, joining, job),
        _tuner(node, joining, job, leadership),
    )


def _control_server(
    node: NodeParts, joining: Joining, seen: LocalJobState, kept: KeptRecords
) -> ControlServer:
    control = ControlServer(
        joining.address,
        joining.found.identity,
        node.agent_id,
        lambda: node.workers.worker_ids,
        kept.get,
        OwnAnswers(node.agent_id, node.workers, node.inbox.put, joining.dashboard),
        node.sessions.traces,
        node.node_name,
        lambda: seen.restarts,
        joining.is_stuck,
    )
    joining.opened.callback(control.stop)
    return control


def _leased_keys(node: NodeParts, joining: Joining, seen: LocalJobState, lease_ttl_s: float) -> LeasedKeys:
    leased = LeasedKeys(
        joining.store,
        lease_ttl_s,
        lambda event: node.inbox.put(LeaseChanged(event)),
        # Restarted workers that wait for one of this node may report nothing, so that no agent probes this one.
        lambda: seen.restarts and seen.nodes > 1 and joining.is_stuck(),
    )
    joining.opened.callback(leased.close)
    return leased


def _joined_job(node: NodeParts, joining: Joining, seen: LocalJobState, leased: LeasedKeys) -> JoinedJob:
    opened = joining.opened
    writes = DesiredWrites(node.timers)
    opened.callback(writes.stop)  # waits for the write under way, which may go on to remove leased keys
    writer = HistoryWriter(joining.store, joining.on_event)
    opened.callback(writer.stop)
    job = JoinedJob(
        node.agent_id,
        node.node_name,
        node.keys,
        seen,
        joining.store,
        leased,
        writes,
        node.timers,
        node.terminal,
        HistoryKeeper(node.keys, node.node_name, writer),
        ChangeLines(node.terminal, node.timers, node.agent_id),
    )
    opened.callback(job.change_lines.say_held)  # also when the agent fails
    return job


def _leadership(node: NodeParts, joining: Joining, job: JoinedJob, records: WholeRecords) -> Leadership:
    leadership = Leadership(
        job.store,
        job.keys,
        job.leased,
        joining.found.identity,
        node.config.probe_window_s,
        lambda report: node.inbox.put(LeadershipReported(report)),
        records.stored,
    )
    joining.opened.callback(leadership.stop)
    return leadership


def _own_key(node: NodeParts, job: JoinedJob, control_address: str) -> OwnKey:
    return OwnKey(
        job.leased,
        job.keys,
        agent_id=job.agent_id,
        node_name=job.node_name,
        control_address=control_address,
        slots=node.config.slots,
        node_rank=node.config.node_rank,
    )


def _hang_orders(node: NodeParts, joining: Joining, job: JoinedJob) -> HangOrders:
    orders = HangOrders(job, node.workers, node.sessions.tell_disagreement)
    joining.opened.callback(orders.stop)
    return orders


def _tuner(node: NodeParts, joining: Joining, job: JoinedJob, leadership: Leadership) -> Tuner | None:
    """Returns None for a job that is not tuned; its agent does not load the tuner either."""
    if not job.seen.spec.autotune.level:
        return None
    from bagua_agent.autotune.tuner import Tuner

    tuner = Tuner(job, leadership.writes.write_study, node.inbox.put, node.config.autotune_verbose)
    joining.opened.callback(tuner.stop)
    return tuner


def lifecycle_of_workers(node: NodeParts, agent: Agent) -> WorkerLifecycle:
    """Returns the way of running workers that the job's mode calls for."""
    job = agent.job
    if not job.seen.restarts:
        return LiveWorkers(
            job,
            node.workers,
            node.sessions,
            agent.policy,
            agent.membership.suspect_leader,
            agent.own_key.one_slot_less,
            node.config.shutdown_timeout_s,
        )
    nonce = job.seen.spec.nonce
    return RestartedWorkers(
        job,
        node.workers,
        node.sessions,
        agent.own_key,
        on_session=lambda: job.writes.until_done("mode", lambda: make_live(job.store, job.keys, nonce)),
        on_suspicion=agent.membership.suspect_leader,
        shutdown_timeout_s=node.config.shutdown_timeout_s,
    )


def _policy(config: JobConfig, max_restarts: int, lease_ttl_s: float) -> Policy:
    return Policy(
        last_call_s=config.last_call_s,
        node_window_s=config.node_window_s,
        holder_timeout_s=config.holder_timeout_s if config.holder_timeout_s is not None else float("inf"),
        below_minimum_timeout_s=config.below_minimum_timeout_s,
        join_timeout_s=config.join_timeout_s,
        probe_window_s=config.probe_window_s,
        lease_ttl_s=lease_ttl_s,
        ends_when_all_leave=config.ends_when_all_leave,
        max_restarts=max_restarts,
        hang_notice_s=config.hang_notice_s,
        hang_renew_s=config.hang_renew_s,
        hang_timeout_s=config.hang_timeout_s,
    )
