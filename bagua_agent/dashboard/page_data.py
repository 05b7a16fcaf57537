"""Makes the data of the page from a job's facts and its course so far. Pure; JSON-like values only.

Everything that the page says in words is decided here, so that it can be tested without a browser. The page draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bagua_agent.base.plain_text import shortened
from bagua_agent.history.job_history import EventKind, JobEvent, ranks_by_node
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.agent_calls import AgentSeen
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.series import JobSeries, speeds
from bagua_agent.observation.trouble_rules import checkpoint_step, failed_together, losses
from bagua_agent.observation.verdict import verdict
from bagua_agent.observation.verdict_parts import Level
from bagua_contract import control_pb2
from bagua_contract.addresses import is_loopback
from bagua_contract.compression_ratio import compression_of
from bagua_contract.records import Generation
from bagua_contract.time_use import TimeUse, goodput_of

MOST_EVENTS = 200
MOST_GENERATIONS = 60
MOST_FAILURES = 20
MOST_WORKERS = 512  # rows of tables and of the heat map; more can't be read
LONGEST_TRACEBACK = 8000

Page = dict[str, Any]

# In the order of the bar: first what counts, then what a change of membership took, then the rest.
USES: tuple[tuple[TimeUse, str], ...] = (
    (TimeUse.STEP, "steps"),
    (TimeUse.FAILED_STEP, "steps done again"),
    (TimeUse.HANG, "hangs"),
    (TimeUse.FAILOVER, "failover"),
    (TimeUse.SWITCH, "joins and leaves"),
    (TimeUse.HEAL, "copies of the state"),
    (TimeUse.CHECKPOINT, "checkpoints"),
    (TimeUse.WAITING, "waiting for nodes"),
    (TimeUse.STANDBY, "standby"),
    (TimeUse.START, "start"),
)


def page_data(facts: JobFacts, series: JobSeries, served_by: str) -> Page:
    """Returns the data of a job's page. served_by: node name of the agent that serves the page; empty for none of the
    job's."""
    said = verdict(facts, series)
    newest = series.points[-1] if series.points else None
    return {
        "job": facts.job_id,
        "at": facts.at_unix_s,
        "served_by": served_by,
        "verdict": {**asdict(said), "level": said.level.value},
        "progress": _progress(facts, series),
        "goodput": {**goodput(series.spent_s()), "computing_share": series.computing_share()},
        "generations": generations(facts.events, facts.generation),
        "series": _series(series),
        "heat": heat(series),
        "nodes": [_node(agent, facts, served_by) for agent in facts.agents],
        "workers": [_worker(agent, worker, series) for agent, worker in facts.workers[:MOST_WORKERS]],
        "failures": failures(facts, series),
        "failures_first": said.level is Level.BAD or bool(losses(facts, series)),
        "events": [_event(event) for event in facts.events[-MOST_EVENTS:]],
        "metrics": dict(newest.metrics) if newest is not None else {},
        "over": facts.result is not None,
    }


def _progress(facts: JobFacts, series: JobSeries) -> Page:
    """Returns the progress of the job. eta_s: at the newest rate; None where the total or the rate is unknown.
    checkpoint: see checkpoint_step."""
    reports = [w.progress for _, w in facts.workers if w.HasField("progress")]
    step = max((r.step for r in reports), default=series.step)
    total = max((r.total_steps for r in reports), default=0)
    rate = series.recent_rate()
    generation = facts.generation
    return {
        "step": step,
        "total": total,
        "epoch": max((r.epoch for r in reports), default=0),
        "steps_per_s": rate,
        "samples_per_s": series.recent_samples_per_s(),
        "eta_s": (total - step) / rate if rate and total > step else None,
        "generation": 0 if generation is None else generation.number,
        "world_size": 0 if generation is None else generation.world_size,
        "nodes": 0 if generation is None else generation.node_count,
        "min_nodes": facts.desired.min_nodes,
        "max_nodes": facts.desired.max_nodes,
        "script": facts.spec.script,
        "checkpoint": checkpoint_step(facts) or None,
    }


def goodput(spent_s: Mapping[str, float]) -> Page:
    """Returns the goodput and its parts. share: of the time of all workers (`goodput_of`); None before there is any.
    parts: in a fixed order."""
    named = [(use.value, name) for use, name in USES]
    known = {use for use, _ in named}
    named += [(use, use.replace("_", " ")) for use in sorted(spent_s.keys() - known)]  # of a newer version
    return {
        "share": goodput_of(spent_s),
        "parts": [
            {"use": use, "name": name, "seconds": spent_s[use]}
            for use, name in named
            if spent_s.get(use, 0.0) > 0
        ],
    }


def generations(events: tuple[JobEvent, ...], newest: Generation | None) -> list[Page]:
    """Returns the generations, the newest last. cost_s: None until its first step is committed. members: by node; all
    nodes of the newest."""
    cost = {e.generation: e.lost_s for e in events if e.kind is EventKind.GENERATION_IN_FORCE}
    since = {e.generation: e.time_unix_s for e in events if e.kind is EventKind.GENERATION_IN_FORCE}
    found: list[Page] = [
        {
            "number": e.generation,
            "kind": e.generation_kind.lower(),
            "at": e.time_unix_s,
            "in_force_at": since.get(e.generation),
            "world_size": e.world_size,
            "text": _without_number(e.text, e.generation),
            "cost_s": cost.get(e.generation),
            "is_pending": newest is not None and newest.number == e.generation and e.generation not in cost,
            "members": _members(e, newest),
        }
        for e in events
        if e.kind is EventKind.GENERATION_FORMED
    ]
    return found[-MOST_GENERATIONS:]


def _without_number(text: str, number: int) -> str:
    return text.removeprefix(f"generation {number}, ").removeprefix("now: ")


def _members(event: JobEvent, newest: Generation | None) -> list[str]:
    if newest is not None and newest.number == event.generation:
        return list(ranks_by_node(newest, len(newest.members)))
    return list(event.members)


def _series(series: JobSeries) -> Page:
    points = series.points
    rates = speeds(points)
    names = sorted({name for point in points for name in point.metrics})
    return {
        "at": [p.at_unix_s for p in points],
        "steps_per_s": rates,
        "samples_per_s": [
            rate * p.step_samples if rate is not None and p.step_samples else None
            for rate, p in zip(rates, points, strict=True)
        ],
        "world_size": [p.world_size for p in points],
        "generation": [p.generation for p in points],
        "metrics": {name: [p.metrics.get(name) for p in points] for name in names},
    }


def heat(series: JobSeries) -> Page:
    """Returns the computing time of a step, by global rank (rows) and time (columns), in seconds; None where it is
    unknown."""
    points = series.timed
    ranks = sorted({rank for point in points for rank in point.computing_s})[:MOST_WORKERS]
    return {
        "ranks": ranks,
        "steps": [p.step for p in points],
        "seconds": [[p.computing_s.get(rank) for p in points] for rank in ranks],
    }


def _node(agent: AgentSeen, facts: JobFacts, served_by: str) -> Page:
    generation = facts.generation
    ranks = [m.global_rank for m in generation.members if m.agent_id == agent.agent_id] if generation else []
    node = agent.node
    if agent.leaving:
        state = "leaves"
    elif agent.is_silent:
        state = "unknown" if facts.problem else "silent"
    elif ranks:
        state = "trains"
    else:
        state = "standby" if generation is not None and generation.members else "joins"
    if agent.busy:
        state += ", busy"
    return {
        "agent": agent.agent_id,
        "name": agent.node_name,
        "slots": agent.slots,
        "state": state,
        "ranks": ranks,
        "leads": node is not None and node.leads,
        "dashboard": _dashboard(agent, facts, served_by),
        "etcd": node is None or node.store_answers,
    }


def _dashboard(agent: AgentSeen, facts: JobFacts, served_by: str) -> str:
    """Returns the address of the agent's own page; empty if it has none, and if it is a loopback address of another
    host than the one that serves this page: there it may lead to the page of another job."""
    address = agent.node.dashboard if agent.node is not None else ""
    if is_loopback(_host(address)):
        own = {_host(a.address) for a in facts.agents if served_by and a.node_name == served_by}
        return address if _host(agent.address) in own else ""
    return address


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _worker(agent: AgentSeen, worker: control_pb2.WorkerNow, series: JobSeries) -> Page:
    progress = worker.progress
    computing = series.recent_computing_s()
    rank = worker.global_rank if worker.HasField("global_rank") else None
    return {
        "agent": agent.agent_id,
        "node": agent.node_name,
        "slot": worker.slot,
        "pid": worker.pid,
        "rank": rank,
        "step": progress.step if worker.HasField("progress") else None,
        "computing_s": computing.get(rank) if rank is not None else None,
        "heal_s": progress.spent_s.get(TimeUse.HEAL.value, 0.0),
        "metrics": dict(sorted(progress.metrics.items())),
        "network": _network(worker, series),
    }


def _network(worker: control_pb2.WorkerNow, series: JobSeries) -> Page:
    """Returns what the worker sends, and the copies of the state that it received. net: Bagua-Net's counters, for what
    NCCL sends, which is in no other value here; None where no value is known."""
    progress, sent = worker.progress, series.sent.get(worker.worker_id)
    return {
        "interface": progress.interface or None,
        "sent_per_s": sent.bytes_per_s if sent is not None else None,
        "sent_a_step": sent.bytes_a_step if sent is not None else None,
        "sent_bytes": progress.sent_bytes if worker.HasField("progress") else None,
        "compression": compression_of(progress),
        "net_bytes": worker.net.get("bytes_sent"),
        "heal_bytes": progress.copied_bytes,
        "heal_s": progress.copied_s,
    }


def failures(facts: JobFacts, series: JobSeries) -> list[Page]:
    """Returns failures: what the last loss or the job's end began with, what belongs to it, then earlier ones, the
    newest first."""
    found = failed_together(facts, series)
    shown: list[tuple[FailureView, str, str]] = []
    if found is not None:
        shown.append((found.cause, "first failure", found.why))
        shown += [(other, "failed by itself", "") for other in reversed(found.others)]
        shown += [(other, "explained by the first", "") for other in reversed(found.casualties)]
    named = {failure.worker_id for failure, _, _ in shown}
    shown += [(f, "earlier", "") for f in reversed(facts.failures) if f.worker_id not in named]
    return [
        {
            "role": role,
            "why": why,
            "node": failure.node_name,
            "slot": failure.slot,
            "rank": failure.global_rank if failure.global_rank >= 0 else None,
            "exit_code": failure.exit_code,
            "summary": shortened(failure.summary),
            "traceback": failure.traceback_tail[-LONGEST_TRACEBACK:],
            "log_path": failure.log_path,
        }
        for failure, role, why in shown[:MOST_FAILURES]
    ]


def _event(event: JobEvent) -> Page:
    return {
        "at": event.time_unix_s,
        "node": event.node_name,
        "kind": event.kind.name.lower(),
        "generation": event.generation,
        "text": event.text,
    }


def finite(value: Any) -> Any:
    """Returns value without NaN and infinities, which JSON has not: a loss that diverged is shown as missing."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
