"""Builds the parts of an agent: those that its node has at once, and those that need the job it joins.

loop.py drives them. What is opened here is closed by the ExitStack that the caller gives, last first.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.autotune.tuner import Tuner
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
class JobParts:
    """The parts that an agent has of its job, and by which it takes part. subscription: not started yet."""

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
    tuner: Tuner


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


def job_parts(
    node: NodeParts,
    store: Store,
    address: str,
    found: JobFound,
    *,
    hosts_store: bool,
    opened: ExitStack,
    dashboard: str = "",
    on_event: Callable[[str, bytes], object],
    is_stuck: Callable[[], bool],
) -> JobParts:
    """Makes the parts that need the job.

    hosts_store: for other nodes. dashboard: HOST:PORT at which this agent serves one; empty for none. on_event: gets
    the events that this agent writes, with their keys. is_stuck: whether the loop does not go on.
    """
    config, inbox, keys, agent_id = node.config, node.inbox, node.keys, node.agent_id
    kept, limits = KeptRecords(), Limits.from_environment()
    answers = OwnAnswers(agent_id, node.workers, inbox.put, dashboard)
    remembered = {keys.identity: found.identity.encode()}
    seen = LocalJobState(spec=found.spec, view=JobView(), remembered=remembered)
    control = ControlServer(
        address,
        found.identity,
        agent_id,
        lambda: node.workers.worker_ids,
        kept.get,
        answers,
        node.sessions.traces,
        node.node_name,
        lambda: seen.restarts,
        is_stuck,
    )
    opened.callback(control.stop)
    lease_ttl_s = limits.lease_ttl_s(config.lease_ttl_s, max(found.nodes, config.min_nodes))
    leased = LeasedKeys(
        store,
        lease_ttl_s,
        lambda event: inbox.put(LeaseChanged(event)),
        # Restarted workers that wait for one of this node may report nothing, so that no agent probes this one.
        lambda: seen.restarts and seen.nodes > 1 and is_stuck(),
    )
    opened.callback(leased.close)
    writes = DesiredWrites(node.timers)
    opened.callback(writes.stop)  # waits for the write under way, which may go on to remove leased keys
    writer = HistoryWriter(store, on_event)
    opened.callback(writer.stop)
    job = JoinedJob(
        agent_id,
        node.node_name,
        keys,
        seen,
        store,
        leased,
        writes,
        node.timers,
        node.terminal,
        HistoryKeeper(keys, node.node_name, writer),
        ChangeLines(node.terminal, node.timers, agent_id),
    )
    opened.callback(job.change_lines.say_held)  # also when the agent fails
    records = WholeRecords(store, keys, found.identity, agent_id, control.address, kept, limits)
    leadership = Leadership(
        store,
        keys,
        leased,
        found.identity,
        config.probe_window_s,
        lambda report: inbox.put(LeadershipReported(report)),
        records.stored,
    )
    opened.callback(leadership.stop)
    subscription = JobSubscription(
        store, keys, agent_id, records, limits, inbox, hosts_store=hosts_store, nodes=found.nodes
    )
    lost_keys = LostKeys(job, subscription.state, limits, config.submission)
    policy = _policy(config, seen.failures_allowed, lease_ttl_s)
    own_key = OwnKey(
        leased,
        keys,
        agent_id=agent_id,
        node_name=node.node_name,
        control_address=control.address,
        slots=config.slots,
        node_rank=config.node_rank,
    )
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
    scope = SubscriptionScope(job, subscription, membership, lost_keys)
    hang_orders = HangOrders(job, node.workers, node.sessions.tell_disagreement)
    opened.callback(hang_orders.stop)
    tuner = Tuner(job, leadership.write_study, inbox.put, config.autotune_verbose)
    opened.callback(tuner.stop)
    return JobParts(
        job,
        found.identity,
        limits,
        policy,
        records,
        subscription,
        lost_keys,
        own_key,
        membership,
        scope,
        hang_orders,
        tuner,
    )


def lifecycle_of_workers(node: NodeParts, parts: JobParts) -> WorkerLifecycle:
    """Returns the way of running workers that the job's mode calls for."""
    job = parts.job
    if not job.seen.restarts:
        return LiveWorkers(
            job,
            node.workers,
            node.sessions,
            parts.policy,
            parts.membership.suspect_leader,
            parts.own_key.one_slot_less,
            node.config.shutdown_timeout_s,
        )
    nonce = job.seen.spec.nonce
    return RestartedWorkers(
        job,
        node.workers,
        node.sessions,
        parts.own_key,
        on_session=lambda: job.writes.until_done("mode", lambda: make_live(job.store, job.keys, nonce)),
        on_suspicion=parts.membership.suspect_leader,
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
