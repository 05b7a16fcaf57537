"""Defines the verdict's rules for faults of a job that goes on, or waits: what is broken, where, and what to do next.
Pure.

Each rule returns None where it does not apply. verdict.py orders them. The thing that failed comes first in each line.
"""

from __future__ import annotations

import math
from statistics import median

from bagua_agent.base.plain_text import counted, some
from bagua_agent.history.job_history import EventKind, JobEvent, worker_ended_name
from bagua_agent.membership.failures import root_cause
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.agent_calls import AgentSeen
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.verdict_parts import (
    MOST_NAMES,
    Level,
    Verdict,
    stands_still,
    standstill_s,
    trains,
    without_step_s,
)
from bagua_contract import control_pb2

RECENT_S = 60.0  # a loss or a change is mentioned for so long
LEAST_STALL_S = 15.0
STALL_STEPS = 10.0  # times the usual step
LEAST_END_S = 30.0  # a script may write its results after its last step
KEY_KEPT_S = 15.0  # a silent agent whose key is in etcd for so long keeps it alive; longer than a usual lease
SLOWER_BY = 1.5  # as elastic/checks/stragglers.py
LEAST_GAP_S = 0.002
LEAST_LOOKS = 3  # before a rank is called slow: one look may meet a checkpoint or another program


def etcd_away(facts: JobFacts, series: JobSeries) -> Verdict | None:
    """Reports that etcd is away: agents report it, or this reader of etcd finds it out."""
    away = [a.node_name for a in facts.agents if a.node is not None and not a.node.store_answers]
    if not away and not facts.store_problem:
        return None
    what = f"etcd does not answer {some(away, MOST_NAMES) if away else 'this page'}"
    silent = [a.node_name for a in facts.agents if a.is_silent]
    if silent:
        return Verdict(
            Level.WARNING,
            f"{what}, and neither does the agent of {some(silent, MOST_NAMES)}.",
            "The host that serves this page may be cut off; what is shown of the others is not new.",
            "Look at this host's network, and open the page of another node.",
        )
    if stands_still(facts, series):
        return Verdict(
            Level.BAD,
            f"{what}, and no step was committed for {without_step_s(facts, series):.0f} s.",
            "A lost worker holds the others up, for a loss or a join has no effect until etcd answers.",
            "Look at etcd and at the network to it.",
        )
    has_begun = facts.generation is not None and not facts.generation.is_gathering
    return Verdict(
        Level.WARNING,
        f"{what}.",
        "Training goes on, but a loss or a join has no effect until etcd answers."
        if has_begun
        else "The job begins once etcd answers.",
        "Look at etcd and at the network to it.",
    )


def stopped_workers(facts: JobFacts, series: JobSeries) -> Verdict | None:
    stopped = [(a, w) for a, w in facts.workers if w.stopped]
    if not stopped:
        return None
    agent, worker = stopped[0]
    since = f", for {without_step_s(facts, series):.0f} s" if stands_still(facts, series) else ""
    return Verdict(
        Level.BAD,
        f"{_names(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped, and the other workers wait{since}.",
        "The process got SIGSTOP, or a debugger holds it. It is replaced after --hang-timeout.",
        f"Let it go on (kill -CONT {worker.pid} on {agent.node_name}), or kill it: another worker takes its place.",
    )


def stalled_workers(facts: JobFacts, series: JobSeries) -> Verdict | None:
    """Reports stalled workers. Workers report waits early, so a wait counts once it is long for a person too."""
    found = [s for s in facts.suspicions if s.stalled]
    generation = facts.generation
    if not found or generation is None:
        return None
    longest = max(found, key=lambda s: s.waited_s)
    if not stands_still(facts, series) and longest.waited_s < standstill_s(series):
        return None
    waited_s = max(longest.waited_s, without_step_s(facts, series))
    waiting = {s.worker_id for s in found}
    late = [m for m in generation.members if m.worker_id not in waiting]
    everyone = counted(generation.world_size, "worker")
    if not late:
        return Verdict(
            Level.BAD,
            f"All {everyone} wait in a collective, for {waited_s:.0f} s.",
            f"The network between them or a device is what they wait for: {longest.detail}.",
            "Look at the network; the collectives of a rank show which one it is.",
        )
    names = some(
        (_worker(m.node_name, m.slot, m.global_rank, lower=place > 0) for place, m in enumerate(late)),
        MOST_NAMES,
    )
    wait = f"{len(found)} of {everyone} {'waits' if len(found) == 1 else 'wait'}"
    return Verdict(
        Level.BAD,
        f"{names} {'holds' if len(late) == 1 else 'hold'} the job up, for {waited_s:.0f} s.",
        f"{wait} in a collective, to which {'it has' if len(late) == 1 else 'they have'} not come: {longest.detail}.",
        "Open the stacks of the ranks that do not wait.",
    )


def silent_agents(facts: JobFacts, series: JobSeries) -> Verdict | None:
    silent = [agent for agent in facts.agents if agent.is_silent]
    if not silent or facts.problem:
        return None
    names = some((agent.node_name for agent in silent), MOST_NAMES)
    still = stands_still(facts, series)
    what = f"The agent of {names} does not answer"
    since_s = min(facts.at_unix_s - series.silent_since(agent.agent_id, facts.at_unix_s) for agent in silent)
    return Verdict(
        Level.BAD if still else Level.WARNING,
        f"{what}, and no step was committed for {without_step_s(facts, series):.0f} s."
        if still
        else f"{what}.",
        "Its key in etcd is kept alive, so it runs: the network between it and the host of this page is cut."
        if since_s >= KEY_KEPT_S
        else "It is frozen, cut off, or overloaded; if it does not come back, the job goes on without it.",
        "Look at that node: is it up, and reachable from here?",
    )


def no_step(facts: JobFacts, series: JobSeries) -> Verdict | None:
    since_s = without_step_s(facts, series)
    if since_s < max(LEAST_STALL_S, STALL_STEPS * series.usual_step_s()):
        return None
    return Verdict(
        Level.BAD,
        f"No step was committed for {since_s:.0f} s; the newest is step {series.step}.",
        "The script is outside its loop (an evaluation, a checkpoint), or a rank hangs.",
        "Open the stacks of a rank to see where it is.",
    )


def workers_do_not_end(facts: JobFacts, series: JobSeries) -> Verdict | None:
    since_s = facts.at_unix_s - series.closing_since_unix_s
    left = [(a, w) for a, w in facts.workers if w.HasField("global_rank")]
    if not facts.closing or not left or since_s < LEAST_END_S:
        return None
    has, its = ("has", "its") if len(left) == 1 else ("have", "their")
    return Verdict(
        Level.WARNING,
        f"{_names(left)} {has} not ended, {since_s:.0f} s after {its} last step.",
        "The script does something after its loop, or a thread or a library keeps its process from ending.",
        "Open the stacks of a rank to see where it is.",
    )


def checkpoints_fail(facts: JobFacts, series: JobSeries) -> Verdict | None:
    found = [(a, w) for a, w in facts.workers if w.progress.checkpoint_trouble]
    if not found:
        return None
    kept = checkpoint_step(facts)
    newest = f"the newest checkpoint that all have written is of step {kept}" if kept else "older ones stay"
    return Verdict(
        Level.WARNING,
        f"Checkpoints are not written: {found[0][1].progress.checkpoint_trouble}.",
        f"It is the part of {_names(found, lower=True)}. Training goes on; {newest}.",
        "Make room on that disk, or repair the store: the next checkpoint is tried when it is due.",
    )


def checkpoint_step(facts: JobFacts) -> int:
    """Returns the step of the newest checkpoint of which every worker that writes has written its part; 0: none.

    A worker that has written nothing, without trouble, is left out: it joined lately, or rank 0 alone writes because
    replicas differ.
    """
    members = [w.progress for _, w in facts.workers if w.HasField("global_rank")]
    return min((p.checkpoint_step for p in members if p.checkpoint_step or p.checkpoint_trouble), default=0)


def straggler(facts: JobFacts, series: JobSeries) -> Verdict | None:
    computing = series.recent_computing_s() if len(series.timed) >= LEAST_LOOKS else {}
    if len(computing) < 2:
        return None
    slowest = max(computing, key=lambda rank: computing[rank])
    others_s = median(seconds for rank, seconds in computing.items() if rank != slowest)
    if computing[slowest] < SLOWER_BY * others_s or computing[slowest] - others_s < LEAST_GAP_S:
        return None
    nodes = [a.node_name for a, w in facts.workers if w.HasField("global_rank") and w.global_rank == slowest]
    if not nodes:
        return None  # it is gone
    return Verdict(
        Level.WARNING,
        f"Rank {slowest} on {nodes[0]} slows the job down.",
        f"It computes {computing[slowest]:.3g} s a step, the others {others_s:.3g} s, and they wait for it.",
        "Look for another process on its processor or GPU, and at its data; its row stands out in the heat map.",
    )


def losses(facts: JobFacts, series: JobSeries) -> list[JobEvent]:
    """Returns the losses of the last minute, the newest last."""
    kinds = (EventKind.WORKER_LOST, EventKind.WORKER_FAILED, EventKind.NODE_LOST)
    since_s = facts.at_unix_s - RECENT_S
    return [e for e in facts.events if e.kind in kinds and series.events.unix_s(e.name) >= since_s]


def failed_together(facts: JobFacts, series: JobSeries) -> root_cause.RootCause | None:
    """Returns the failures that have to do with each other: those around the one that ended the job, else the newest
    one and those of the minute before it, however long ago that is. None if there are none. Failures of other times
    neither explain these nor are explained by them."""

    def failed_s(failure: FailureView) -> float:
        return series.events.unix_s(worker_ended_name(failure.worker_id))

    ended_job = facts.result is not None and facts.result.HasField("failure")
    if facts.result is not None and ended_job:
        around = FailureView.of(facts.result.failure, 0)
        around = next((f for f in facts.failures if f.worker_id == around.worker_id), around)
    elif facts.failures:
        around = max(facts.failures, key=lambda f: (failed_s(f), f.order))
    else:
        return None
    if not math.isfinite(failed_s(around)):  # its event is gone
        return root_cause.beside(around, ())
    together = [f for f in facts.failures if failed_s(f) >= failed_s(around) - RECENT_S]
    return root_cause.beside(around, together) if ended_job else root_cause.root_cause(together)


def lost_lately(facts: JobFacts, series: JobSeries) -> Verdict | None:
    lost = losses(facts, series)
    if not lost or facts.generation is None:
        return None
    newest = lost[-1]
    node = newest.node_name
    follows = "Nothing: a successor joins by itself. Read its log if it happens again."
    if newest.kind is EventKind.NODE_LOST:
        what, why = (
            f"node {node} was lost",
            f"{node} did not answer: its host, its link or its agent was gone.",
        )
        follows = f"Look at {node}: is it up, and reachable? If its agent lives, it joins again by itself."
        if any(m.node_name == node for m in facts.generation.members):
            follows = f"Nothing: {node} is back."
    else:
        what, why = f"a worker of {node} was lost", newest.text
        is_known = any(f.worker_id == newest.worker_id for f in facts.failures)
        if is_known and (found := failed_together(facts, series)) is not None:
            cause = found.cause
            worker = _worker(cause.node_name, cause.slot, cause.global_rank, lower=True)
            what = f"{worker} {'failed' if cause.script_failure else 'was lost'}"
            why = f"{cause.node_name}, slot {cause.slot}: {cause.summary}"
    many = f" ({len(lost)} losses within a minute)" if len(lost) > 1 else ""
    return Verdict(Level.WARNING, f"{trains(facts, series)}, after {what}{many}.", why, follows)


def _worker(node: str, slot: int, global_rank: int, *, lower: bool = False) -> str:
    """Returns the words for a worker. global_rank: negative for none."""
    name = f"Rank {global_rank} on {node}" if global_rank >= 0 else f"The worker in slot {slot} of {node}"
    return name[0].lower() + name[1:] if lower else name


def _names(workers: list[tuple[AgentSeen, control_pb2.WorkerNow]], *, lower: bool = False) -> str:
    return some(
        (
            _worker(
                agent.node_name,
                worker.slot,
                worker.global_rank if worker.HasField("global_rank") else -1,
                lower=lower or place > 0,
            )
            for place, (agent, worker) in enumerate(workers)
        ),
        MOST_NAMES,
    )
