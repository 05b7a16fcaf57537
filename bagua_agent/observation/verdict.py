"""Says in one line what happens in a job, why, and what to do next. Pure: a list of rules, the first that applies wins.

Rules go from what ends a job over what stops it to what slows it down. A rule reads the facts and the series alone, and
never repeats a decision of the leader: reasons come from the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import median

from bagua_agent.base.plain_text import counted, shortened, some
from bagua_agent.history.job_history import EventKind, JobEvent
from bagua_agent.membership.failures import root_cause
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.series import JobSeries
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import GenerationKind

RECENT_S = 60.0  # a loss or a change is mentioned for so long
LEAST_STALL_S = 15.0
STALL_STEPS = 10.0  # times the usual step
SLOWER_BY = 1.5  # as elastic/checks/stragglers.py
LEAST_GAP_S = 0.002
LEAST_LOOKS = 3  # before a rank is called slow: one look may meet a checkpoint or another program
_MOST_NAMES = 4


class Level(Enum):
    GOOD = "good"
    WAITING = "waiting"  # nothing is wrong, and nothing is trained
    WARNING = "warning"  # it trains, and something wants a person's attention
    BAD = "bad"  # it does not train


@dataclass(frozen=True, slots=True)
class Verdict:
    """what: happens. why: as far as it is known. next: what a person can do. Each is one sentence, or empty."""

    level: Level
    what: str
    why: str
    next: str


def verdict(facts: JobFacts, series: JobSeries) -> Verdict:
    for rule in _RULES:
        found = rule(facts, series)
        if found is not None:
            return found
    raise AssertionError("the last rule always applies")


def _ended(facts: JobFacts, series: JobSeries) -> Verdict | None:
    result = facts.result
    if result is None:
        return None
    if result.outcome == pb.Result.SUCCEEDED:
        return Verdict(Level.GOOD, "The job has succeeded.", result.reason, "")
    if result.outcome == pb.Result.STOPPED:
        again = f"Start it again with --rdzv-id {facts.job_id}; with --checkpoint-dir it goes on from its checkpoint."
        return Verdict(Level.WAITING, "The job was stopped.", result.reason, again)
    if not result.HasField("failure"):
        return Verdict(Level.BAD, "The job has failed.", result.reason, "Read the events below.")
    first = FailureView.of(result.failure, 0)
    where = f"{first.node_name}, slot {first.slot}" + (
        f", rank {first.global_rank}" if first.global_rank >= 0 else ""
    )
    others = f" {result.casualties}." if result.casualties else ""
    return Verdict(
        Level.BAD,
        f"The job has failed: {shortened(first.summary)}",
        f"The first failure was on {where}.{others}",
        f"Read its traceback below; its files are in {first.log_path}.",
    )


def _no_nodes(facts: JobFacts, series: JobSeries) -> Verdict | None:
    if facts.agents or facts.problem:
        return None
    return Verdict(
        Level.BAD,
        "No node of the job is present.",
        "Its agents have ended or lost etcd.",
        f"Start nodes with --rdzv-id {facts.job_id}, and the job goes on.",
    )


def _starting(facts: JobFacts, series: JobSeries) -> Verdict | None:
    generation = facts.generation
    if generation is not None and not generation.is_gathering:
        return None
    nodes, least = len(facts.agents), facts.desired.min_nodes
    if nodes < least:
        return Verdict(
            Level.WAITING,
            f"The job waits for nodes: {nodes} of {least} are present.",
            f"--nnodes asks for {least} or more.",
            "Start bagua-launch on another node, or use `bagua-launch scale` to ask for fewer.",
        )
    why = generation.reason if generation is not None else "Workers start and import torch."
    return Verdict(Level.WAITING, f"The job starts on {counted(nodes, 'node')}.", why, "")


def _waits_for_nodes(facts: JobFacts, series: JobSeries) -> Verdict | None:
    if facts.generation is None or facts.generation.members:
        return None
    return Verdict(
        Level.BAD,
        f"The job waits: {len(facts.agents)} of {counted(facts.desired.min_nodes, 'node')} are present.",
        facts.generation.reason,
        "Start bagua-launch on another node; the waiting workers keep the state.",
    )


def _stalled_workers(facts: JobFacts, series: JobSeries) -> Verdict | None:
    found = [s for s in facts.suspicions if s.stalled]
    if not found:
        return None
    longest = max(found, key=lambda s: s.waited_s)
    waiting = {s.worker_id for s in found}
    generation = facts.generation
    late = [m for m in generation.members if m.worker_id not in waiting] if generation is not None else []
    names = some((f"rank {m.global_rank} ({m.node_name})" for m in late), _MOST_NAMES)
    what = f"{counted(len(found), 'worker')} {'waits' if len(found) == 1 else 'wait'} in a collective"
    return Verdict(
        Level.BAD,
        f"{what}: {longest.detail}",
        f"Not waiting: {names}." if late else "All workers wait, so the network or a shared store is slow.",
        "Open the stacks of the ranks that do not wait.",
    )


def _silent_agents(facts: JobFacts, series: JobSeries) -> Verdict | None:
    silent = [agent.node_name for agent in facts.agents if agent.node is None]
    if not silent or facts.problem:
        return None
    return Verdict(
        Level.WARNING,
        f"The agent of {some(silent, _MOST_NAMES)} does not answer.",
        "It is frozen, cut off, or overloaded; if it does not come back, the job goes on without it.",
        "Look at that node: is it up, and reachable from here?",
    )


def _etcd_away(facts: JobFacts, series: JobSeries) -> Verdict | None:
    away = [a.node_name for a in facts.agents if a.node is not None and not a.node.store_answers]
    if not away:
        return None
    return Verdict(
        Level.WARNING,
        f"etcd does not answer {some(away, _MOST_NAMES)}.",
        "Training goes on, but a loss or a join has no effect until etcd answers.",
        "Look at etcd and at the network to it.",
    )


def _changing(facts: JobFacts, series: JobSeries) -> Verdict | None:
    """A record is newer than what any worker has reported."""
    generation = facts.generation
    reported = [w.progress.generation for _, w in facts.workers if w.HasField("progress")]
    if generation is None or not reported or max(reported) >= generation.number:
        return None
    size = counted(generation.world_size, "worker")
    losing = generation.kind is GenerationKind.FAILOVER
    return Verdict(
        Level.WARNING if losing else Level.WAITING,
        f"The job goes over to generation {generation.number} with {size}.",
        generation.reason,
        "",
    )


def _no_step(facts: JobFacts, series: JobSeries) -> Verdict | None:
    if not series.step or facts.closing:
        return None
    since_s = facts.at_unix_s - series.step_since_unix_s
    usual_s = max(
        (1 / w.progress.steps_per_s for _, w in facts.workers if w.progress.steps_per_s > 0), default=0.0
    )
    if since_s < max(LEAST_STALL_S, STALL_STEPS * usual_s):
        return None
    return Verdict(
        Level.BAD,
        f"No step was committed for {since_s:.0f} s; the newest is step {series.step}.",
        "The script is outside its loop (an evaluation, a checkpoint), or a rank hangs.",
        "Open the stacks of a rank to see where it is.",
    )


def _straggler(facts: JobFacts, series: JobSeries) -> Verdict | None:
    timed = sum(bool(point.computing_s) for point in series.points)
    computing = series.recent_computing_s() if timed >= LEAST_LOOKS else {}
    if len(computing) < 2:
        return None
    slowest = max(computing, key=lambda rank: computing[rank])
    others_s = median(seconds for rank, seconds in computing.items() if rank != slowest)
    if computing[slowest] < SLOWER_BY * others_s or computing[slowest] - others_s < LEAST_GAP_S:
        return None
    node = next(
        (a.node_name for a, w in facts.workers if w.HasField("global_rank") and w.global_rank == slowest), "?"
    )
    return Verdict(
        Level.WARNING,
        f"Rank {slowest} on {node} slows the job down.",
        f"It computes {computing[slowest]:.3g} s a step, the others {others_s:.3g} s, and they wait for it.",
        "Look for another process on its processor or GPU, and at its data; its row stands out in the heat map.",
    )


def lost_lately(facts: JobFacts) -> bool:
    """Whether a worker or a node was lost within the last minute."""
    return bool(_losses(facts))


def _losses(facts: JobFacts) -> list[JobEvent]:
    kinds = (EventKind.WORKER_LOST, EventKind.WORKER_FAILED, EventKind.NODE_LOST)
    return [e for e in facts.events if e.kind in kinds and facts.at_unix_s - e.time_unix_s <= RECENT_S]


def _lost_lately(facts: JobFacts, series: JobSeries) -> Verdict | None:
    lost = _losses(facts)
    if not lost or facts.generation is None:
        return None
    newest = lost[-1]
    many = f" ({len(lost)} losses within a minute)" if len(lost) > 1 else ""
    found = root_cause.root_cause(f for f in facts.failures if any(e.worker_id == f.worker_id for e in lost))
    why = (
        newest.text
        if found is None
        else f"{found.cause.node_name}, slot {found.cause.slot}: {found.cause.summary}"
    )
    return Verdict(
        Level.WARNING,
        f"{_trains(facts, series)} after a loss{many}.",
        why,
        "Nothing: a successor joins by itself. Read its log if it happens again.",
    )


def _trains_well(facts: JobFacts, series: JobSeries) -> Verdict:
    nodes = {m.agent_id for m in facts.generation.members} if facts.generation is not None else set()
    spares = [a.node_name for a in facts.agents if a.agent_id not in nodes and not a.leaving]
    leaving = [a.node_name for a in facts.agents if a.leaving]
    if facts.closing:
        return Verdict(Level.GOOD, "The job finishes: every worker has committed its last step.", "", "")
    why, follows = "", ""
    if leaving:
        why = f"{some(leaving, _MOST_NAMES)} leaves at the next step boundary."
    elif spares and len(nodes) >= facts.desired.max_nodes:
        why = f"{some(spares, _MOST_NAMES)} is on standby: the job has all nodes that it wants."
        follows = f"`bagua-launch scale {facts.job_id}` lets it use more."
    elif spares:
        why = f"{some(spares, _MOST_NAMES)} is on its way into the job."
    elif len(nodes) < facts.desired.max_nodes:
        why = f"It may have up to {counted(facts.desired.max_nodes, 'node')}."
        follows = "Start bagua-launch on another node to make it faster."
    elif facts.spec.mode == pb.JobSpec.RESTART:
        why = "Its script is started again for each change of membership, so it reports no steps."
    if facts.problem:
        why, follows = facts.problem, ""
    return Verdict(Level.GOOD, f"{_trains(facts, series)}.", why, follows)


def _trains(facts: JobFacts, series: JobSeries) -> str:
    generation = facts.generation
    size = 0 if generation is None else generation.world_size
    nodes = 0 if generation is None else generation.node_count
    rate = series.recent_rate()
    pace = f" at {rate:.3g} steps/s" if rate else ""
    return f"The job trains with {counted(size, 'worker')} on {counted(nodes, 'node')}{pace}"


_RULES: tuple[Callable[[JobFacts, JobSeries], Verdict | None], ...] = (
    _ended,
    _no_nodes,
    _starting,
    _waits_for_nodes,
    _stalled_workers,
    _silent_agents,
    _etcd_away,
    _changing,
    _no_step,
    _straggler,
    _lost_lately,
    _trains_well,
)
