"""Says in one line what happens in a job, why, and what to do next. Pure: a list of rules, the first that applies wins.

Rules go from what ends a job over what stops it to what slows it down. A rule reads the facts and the series alone, and
never repeats a decision of the leader: reasons come from the records. trouble_rules.py has the rules for faults.
"""

from __future__ import annotations

from collections.abc import Callable

from bagua_agent.base.plain_text import counted, shortened, some
from bagua_agent.membership.view import FailureView
from bagua_agent.observation import trouble_rules
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.verdict_parts import MOST_NAMES, Level, Verdict, trains
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import GenerationKind


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
    files = f"; its files are in {first.log_path}" if first.log_path else ""
    return Verdict(
        Level.BAD,
        f"The job has failed: {shortened(first.summary)}",
        f"The first failure was on {where}.{others}",
        f"Read its traceback below{files}.",
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
    if facts.problem:
        return Verdict(Level.WAITING, "The job starts.", facts.problem, "")  # nor are its nodes known
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
        f"The job waits for nodes: it needs {facts.desired.min_nodes}."
        if facts.problem  # so it is unknown how many there are
        else f"The job waits: {len(facts.agents)} of {counted(facts.desired.min_nodes, 'node')} are present.",
        facts.generation.reason,
        "Start bagua-launch on another node; the waiting workers keep the state.",
    )


def _changing(facts: JobFacts, series: JobSeries) -> Verdict | None:
    """Reports that the generation changes: a record is newer than what any worker has reported."""
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


def _trains_well(facts: JobFacts, series: JobSeries) -> Verdict:
    nodes = {m.agent_id for m in facts.generation.members} if facts.generation is not None else set()
    spares = [a.node_name for a in facts.agents if a.agent_id not in nodes and not a.leaving]
    leaving = [a.node_name for a in facts.agents if a.leaving]
    if facts.closing:
        return Verdict(Level.GOOD, "The job finishes: every worker has committed its last step.", "", "")
    why, follows = "", ""
    if leaving:
        why = f"{some(leaving, MOST_NAMES)} leaves at the next step boundary."
    elif spares and len(nodes) >= facts.desired.max_nodes:
        why = f"{some(spares, MOST_NAMES)} is on standby: the job has all nodes that it wants."
        follows = f"`bagua-launch scale {facts.job_id}` lets it use more."
    elif spares:
        why = f"{some(spares, MOST_NAMES)} is on its way into the job."
    elif len(nodes) < facts.desired.max_nodes:
        why = f"It may have up to {counted(facts.desired.max_nodes, 'node')}."
        follows = "Start bagua-launch on another node to make it faster."
    elif facts.spec.mode == pb.JobSpec.RESTART:
        why = "Its script is started again for each change of membership, so it reports no steps."
    if facts.problem:
        why, follows = facts.problem, ""
    return Verdict(Level.GOOD, f"{trains(facts, series)}.", why, follows)


_RULES: tuple[Callable[[JobFacts, JobSeries], Verdict | None], ...] = (
    _ended,
    trouble_rules.etcd_away,
    _no_nodes,
    _starting,
    _waits_for_nodes,
    trouble_rules.stopped_workers,
    trouble_rules.silent_agents,
    trouble_rules.stalled_workers,
    _changing,
    trouble_rules.no_step,
    trouble_rules.workers_do_not_end,
    trouble_rules.checkpoints_fail,
    trouble_rules.lost_lately,
    trouble_rules.straggler,
    _trains_well,
)
