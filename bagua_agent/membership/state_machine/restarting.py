"""Decides the next generation in restart mode, where workers start again for each generation.

A job whose workers open no session follows its membership by nodes: every change ends all workers and starts
those of the next generation. Reads the whole picture each time, as decision.py does for live jobs.

States of the job, all read from the picture:

    no members      (no record, or an empty one)  -> enough ready nodes, last call over -> members
    members         runs; its progress is unknown
      lost          an unfinished agent of it is gone, or confirmed dead -> next generation at once
      failed        a worker of it ended with an error             -> ask whether agents live; blame; next, or the end
      leaving       an unfinished agent of it wants to go          -> next at once
      doubted       a touch of an agent of it was refused or silent -> ask whether it lives; decide the rest as below
      changed       ready newcomers, or another number is desired  -> next after the last call
      ending        some worker ended with 0                       -> as above, but no node joins any more
      finished      all workers of all its agents ended with 0, some of which may be gone -> success

Invariants: one generation of one number (the store's transaction); workers of a generation are started only after
those of the one before have ended on that node; a failure is charged to the budget once, and only if the first
cause among the failures of its generation is the script's; nodes that stay keep their order; a
generation that lists nodes has an allowed size (sizes.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bagua_agent.base.plain_text import counted
from bagua_agent.membership.actions import (
    AskWhetherAlive,
    Decision,
    ResultOutcome,
    WriteGeneration,
    WriteResult,
)
from bagua_agent.membership.failures.detection import who_lives
from bagua_agent.membership.failures.restart_policy import killed_too_often, over_budget
from bagua_agent.membership.failures.root_cause import first_cause
from bagua_agent.membership.formation import targets
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.ranks import Chosen, assign
from bagua_agent.membership.view import AgentView, Desired, Evidence, JobView, Run, Waiting
from bagua_agent.membership.worker_names import named_failure
from bagua_contract.records import Generation, GenerationKind, Placement


def worker_id_of(agent_id: str, slot: int, generation: int) -> str:
    """Returns the id of a slot's worker. It is known before the worker is started, since the generation lists it."""
    return f"{agent_id}.{slot}.g{generation}"


def decide_restart(view: JobView, evidence: Evidence, now_s: float, policy: Policy) -> Decision:
    """Decides what should be done now about a job in restart mode. Pure."""
    desired = view.wanted
    if desired is None:
        return Decision(None, "waiting: the desired number of nodes is not written yet")
    there = [a for a in view.agents.values() if not evidence.is_dead(a)]
    record = view.generation
    if (
        policy.ends_when_all_leave
        and there
        and evidence.sees_itself(view)
        and all(a.leaving for a in there)
        and not any(_runs(a, record) for a in there)
    ):
        reason = "every node was asked to leave and has left"
        return Decision(WriteResult(ResultOutcome.STOPPED, 0, reason), f"the job stops: {reason}")
    if record is None or not record.members:
        return _begin(view, desired, evidence, there, now_s, policy)
    inside = [view.agents[a] for a in _agents_of(record) if a in view.agents]
    done = _finished(view, record)
    if done == set(_agents_of(record)):
        reason = "every worker ended with 0"
        return Decision(WriteResult(ResultOutcome.SUCCEEDED, 0, reason), f"the job succeeded: {reason}")
    failed = [a for a in inside if _run(a, record) is Run.FAILED]
    gone = [a for a in _agents_of(record) if a not in view.agents or evidence.is_dead(view.agents[a])]
    if not failed:
        # Its workers need no node that has finished. Else its loss explains the failure: it may have held their store.
        gone = [a for a in gone if a not in done]
    if failed and not gone:
        question = _who_lives(view, inside, failed, evidence, policy, now_s)
        if question is not None:
            return question
    if gone:
        if not failed:
            waits = _may_come_back(view, record, gone, evidence, now_s, policy)
            if waits is not None:
                return waits
        return _next(view, desired, there, record, f"lost {_names(record, gone)}")
    if failed:
        return _after_failure(view, desired, there, record, inside, failed, now_s, policy)
    leaving = [a.agent_id for a in inside if a.leaving and a.agent_id not in done]
    if leaving:
        return _next(view, desired, there, record, f"{_names(record, leaving)} leaves")
    ending = bool(done) or any(_run(a, record) is Run.ENDING for a in inside)
    change = _change(view, desired, there, record, ending, now_s, policy)
    return _with_doubts(change, view, inside, evidence, now_s, policy)


def _begin(
    view: JobView, desired: Desired, evidence: Evidence, there: list[AgentView], now_s: float, policy: Policy
) -> Decision:
    ready = _candidates(view, there)
    least = desired.min_nodes
    if view.generation is None:
        least = view.size_policy.least_to_start(desired.min_nodes, desired.max_nodes)
    if len(ready) < least:
        limit_s, wake_s = policy.below_minimum_timeout_s, None
        reason = f"{len(ready)} of {counted(least, 'node')} ready"
        if limit_s is not None:
            wake_s = evidence.waited_since_s(Waiting.MINIMUM, now_s) + limit_s
            if now_s >= wake_s:
                why = f"too few nodes for {limit_s:g} s: {reason}"
                return Decision(WriteResult(ResultOutcome.FAILED, 1, why), f"the job failed: {why}")
        return Decision(None, f"waiting: {reason}", wake_s, Waiting.MINIMUM)
    last_call_until_s = max(a.ready_since_s for a in ready) + policy.last_call_s
    if len(ready) < desired.max_nodes and now_s < last_call_until_s:
        return Decision(
            None,
            f"last call: {len(ready)} of at most {counted(desired.max_nodes, 'node')} ready",
            last_call_until_s,
        )
    chosen = ready[: view.room(desired).fit(len(ready))]
    return _write(view, chosen, view.generation, f"{counted(len(chosen), 'node')} ready")


def _may_come_back(
    view: JobView, record: Generation, gone: list[str], evidence: Evidence, now_s: float, policy: Policy
) -> Decision | None:
    """Returns a new leader's wait for agents that may only be putting their keys again after etcd was away; None if one
    is dead or the wait is over. The leader asks those whose last address it knows, for the one that is missing is often
    the leader before, with its host."""
    grace_until_s = evidence.elected_at_s + policy.election_grace_s
    known = [a for a in gone if a in view.agents or a in view.gone]
    if now_s >= grace_until_s or any(evidence.is_dead(view.known_agent(a)) for a in known):
        return None
    inquiry = who_lives(view, evidence, known, evidence.elected_at_s, now_s, policy)
    return Decision(
        AskWhetherAlive(inquiry.ask) if inquiry.ask else None,
        f"waiting: {_names(record, gone)} may come back",
        min(grace_until_s, inquiry.again_at_s or grace_until_s),
    )


def _who_lives(
    view: JobView,
    inside: list[AgentView],
    failed: list[AgentView],
    evidence: Evidence,
    policy: Policy,
    now_s: float,
) -> Decision | None:
    """Returns the decision to ask whether the other agents live; None once they have answered. A host's death shows
    first as errors of its peers' workers, so this comes before a worker is blamed."""
    since_s = min(a.run_since_s for a in failed)
    others = [a.agent_id for a in inside if a not in failed]
    inquiry = who_lives(view, evidence, others, since_s, now_s, policy)
    if inquiry.settled:
        return None
    names = ", ".join(a.node_name for a in failed)
    return Decision(
        AskWhetherAlive(inquiry.ask) if inquiry.ask else None,
        f"workers failed on {names}; asking whether the other nodes live",
        inquiry.again_at_s,
    )


def _with_doubts(
    decision: Decision,
    view: JobView,
    inside: list[AgentView],
    evidence: Evidence,
    now_s: float,
    policy: Policy,
) -> Decision:
    """Returns `decision`, and if it is to wait, with the probes of agents in doubt: a doubt never holds up anything
    else."""
    doubted = {a.agent_id: evidence.doubted_agents.get(a.agent_id, float("-inf")) for a in inside}
    unsure = [a for a, since_s in doubted.items() if evidence.alive_agents.get(a, float("-inf")) < since_s]
    if decision.action is not None or not unsure:
        return decision
    inquiry = who_lives(view, evidence, unsure, max(doubted[a] for a in unsure), now_s, policy)
    if inquiry.settled:
        return decision
    wakes = [t for t in (decision.wake_at_s, inquiry.again_at_s) if t is not None]
    action = AskWhetherAlive(inquiry.ask) if inquiry.ask else None
    return replace(decision, action=action, wake_at_s=min(wakes, default=None))


def _after_failure(
    view: JobView,
    desired: Desired,
    there: list[AgentView],
    record: Generation,
    inside: list[AgentView],
    failed: list[AgentView],
    now_s: float,
    policy: Policy,
) -> Decision:
    """Decides what follows a failure while all agents live. A worker is then the cause: the failure that root_cause.py
    ranks first."""
    until_s = min(a.run_since_s for a in failed) + policy.blame_window_s
    over = {a.agent_id for a in inside if _run(a, record) is Run.FINISHED} | view.failures.keys()
    undecided = any(m.worker_id not in over and m.agent_id not in over for m in record.members)
    if undecided and now_s < until_s:
        # the first failure by the clock is often that of a worker that only noticed first, also on one node
        return Decision(None, "a worker failed; waiting for what else fails", until_s)
    failures = [f for f in view.failures.values() if f.generation == record.number]
    cause = first_cause(failures)
    used = record.script_failures + (1 if cause is not None and cause.script_failure else 0)
    for failure in failures:
        if why := killed_too_often(failure, policy.max_restarts, policy.most_kills_in_a_row):
            return Decision(WriteResult(ResultOutcome.FAILED, 1, why, failure), f"the job failed: {why}")
    what = "a worker failed" if cause is None else f"a worker failed: {named_failure(cause)}"
    if used > policy.max_restarts:
        why = f"{over_budget(used, policy.max_restarts)}; {what}"
        return Decision(WriteResult(ResultOutcome.FAILED, 1, why, cause), f"the job failed: {why}")
    return _next(view, desired, there, record, what, (used, record.restarts + 1))


def _change(
    view: JobView,
    desired: Desired,
    there: list[AgentView],
    record: Generation,
    ending: bool,
    now_s: float,
    policy: Policy,
) -> Decision:
    """Decides about ready newcomers and another desired number of nodes. ending: some worker ended with 0."""
    usable = _candidates(view, there)
    target = usable[: view.room(desired).fit(len(usable))]
    before, after = set(_agents_of(record)), {a.agent_id for a in target}
    stands = f"generation {record.number} has {counted(record.world_size, 'worker')}"
    if before == after or len(target) < desired.min_nodes:
        return Decision(None, view.room(desired).awaits(len(before), len(usable) - len(before)) + stands)
    if ending:
        return Decision(None, f"{stands}; workers have begun to end, so no node joins any more")
    newcomers = [a for a in target if a.agent_id not in before]
    if now_s < view.cooldown_until_s:
        change = f"to {counted(len(target), 'node')}"
        wait = view.size_policy.waits(change)
        return Decision(None, wait + stands, view.cooldown_until_s)
    if newcomers:
        until_s = max(a.ready_since_s for a in newcomers) + policy.last_call_s
        if now_s < until_s and len(target) < desired.max_nodes:
            return Decision(None, f"last call: {len(newcomers)} more to let in", until_s)
    added = ", ".join(a.node_name for a in newcomers)
    dropped = _names(record, sorted(before - after))
    parts = [f"adds {added}" if added else "", f"drops {dropped}" if dropped else ""]
    return _write(view, target, record, " and ".join(p for p in parts if p))


def _next(
    view: JobView,
    desired: Desired,
    there: list[AgentView],
    record: Generation,
    why: str,
    failed: tuple[int, int] | None = None,
) -> Decision:
    """Returns the decision to write the generation of the present agents; an empty one, in which no worker runs, if
    they are too few. A minimum raised above the number of nodes in `record` stops no worker, as in live mode
    (targets.py).

    No cooldown keeps a ready node out: the workers start again anyway, so taking it now saves a change.
    """
    usable = _candidates(view, there)
    target = usable[: view.room(desired).fit(len(usable))]
    if len(target) < min(desired.min_nodes, record.node_count):
        target, why = [], f"{why}; {len(target)} of {counted(desired.min_nodes, 'node')} remain"
    return _write(view, target, record, why, failed)


def _write(
    view: JobView,
    nodes: Iterable[AgentView],
    record: Generation | None,
    reason: str,
    failed: tuple[int, int] | None = None,
) -> Decision:
    """Returns the decision to write a generation of these nodes. failed: script failures and restarts so far, after a
    failure; None: as in the record before."""
    number = targets.next_number(view)
    places = {m.agent_id: (m.since_generation, m.join_revision) for m in _last_members(view)}
    chosen = [
        Chosen(
            worker_id=worker_id_of(agent.agent_id, slot, number),
            agent_id=agent.agent_id,
            node_name=agent.node_name,
            slot=slot,
            topology=agent.topology,
            store_address="",
            # a node keeps its place, so that rank 0 stays where the script keeps its files; its key may be younger
            since_generation=since_generation,
            join_revision=join_revision,
            holder=False,
        )
        for agent in nodes
        for since_generation, join_revision in [places.get(agent.agent_id, (number, agent.join_revision))]
        for slot in range(agent.slots)
    ]
    if failed is None:
        failed = (0, 0) if record is None else (record.script_failures, record.restarts)
    generation = Generation(
        number=number,
        base=0,
        kind=GenerationKind.RESTART,
        members=assign(chosen),
        nonce=view.nonce,
        reason=reason,
        script_failures=failed[0],
        restarts=failed[1],
    )
    previous = view.generation_number
    return Decision(
        WriteGeneration(generation, previous),
        f"generation {number} ({counted(len(chosen), 'worker')}): {reason}",
    )


def _candidates(view: JobView, there: list[AgentView]) -> list[AgentView]:
    """Returns the nodes that may be in the next generation: those that are in first, by rank, then in the order they
    came."""
    node_ranks = {m.agent_id: m.node_rank for m in _last_members(view)}
    usable = [a for a in there if not a.leaving and (a.ready or a.agent_id in node_ranks)]
    newest = len(node_ranks)
    return sorted(usable, key=lambda a: (node_ranks.get(a.agent_id, newest), a.join_revision, a.agent_id))


def _last_members(view: JobView) -> tuple[Placement, ...]:
    """Returns the members of the newest record that lists any: an empty one only says that they wait."""
    records = (view.generation, *reversed(view.earlier))
    return next((record.members for record in records if record is not None and record.members), ())


def _agents_of(record: Generation) -> list[str]:
    return list(dict.fromkeys(m.agent_id for m in record.members))


def _finished(view: JobView, record: Generation) -> set[str]:
    """Returns the agents of which every worker of `record` ended with 0, whether they are still there or not."""
    unfinished = {m.agent_id for m in record.members if m.worker_id not in view.finished_restarted}
    known = (*view.gone.values(), *view.agents.values())
    told = {a.agent_id for a in known if _run(a, record) is Run.FINISHED}
    return {a for a in _agents_of(record) if a not in unfinished or a in told}


def _run(agent: AgentView, record: Generation) -> Run:
    return agent.run if agent.run_generation == record.number else Run.NONE


def _runs(agent: AgentView, record: Generation | None) -> bool:
    return record is not None and any(m.agent_id == agent.agent_id for m in record.members)


def _names(record: Generation, agents: Iterable[str]) -> str:
    names = {m.agent_id: m.node_name for m in record.members}
    return ", ".join(names[a] for a in agents)
