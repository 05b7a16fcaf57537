"""Decides whether the job is over, and with which result.

Forms no generation. Rules 6 and 8 of docs/design/membership.md.
"""

from __future__ import annotations

from collections import Counter

from bagua_agent.membership.actions import AskWhetherAlive, Decision, ResultOutcome, WriteResult
from bagua_agent.membership.failures.detection import agents_in_question, who_lives
from bagua_agent.membership.failures.restart_policy import in_doubt, judge
from bagua_agent.membership.failures.root_cause import first_cause, is_casualty
from bagua_agent.membership.formation.departure import parting
from bagua_agent.membership.job_condition import JobCondition
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import Evidence, FailureView, JobView, Waiting
from bagua_agent.membership.worker_names import named, named_failure


def decide_end(
    view: JobView, condition: JobCondition, evidence: Evidence, now_s: float, policy: Policy
) -> Decision | None:
    """Returns the result, or a wait for it; None while the job goes on."""
    if view.closing:
        return _closing(view, condition, evidence, now_s, policy)
    verdict = judge(
        view.failures.values(),
        policy.max_restarts,
        trained=view.has_trained,
        most_kills=policy.most_kills_in_a_row,
    )
    if verdict.fail:
        doubtful = in_doubt(
            view.failures.values(),
            policy.max_restarts,
            trained=view.has_trained,
            since_s=now_s - policy.cause_window_s,
        )
        # A host that is known to be gone explains them, as its worker's agent will say: go on without it.
        if not doubtful or not _misses_a_host(view, condition, evidence):
            wait = _awaiting_cause(view, condition, evidence, doubtful, now_s, policy) if doubtful else None
            return wait or _failed(verdict.reason, verdict.first_failure)
    ends_with_its_agents = policy.ends_when_all_leave and evidence.sees_itself(view)
    if ends_with_its_agents and (reason := _begins_nowhere(view)):
        if now_s < condition.missing_until_s and condition.missing:
            return Decision(None, f"waiting: nodes may come back; {reason}", condition.missing_until_s)
        last = max(view.failures.values(), key=lambda f: f.order, default=None)
        return _failed(reason + (f"; the last: {last.summary}" if last else ""), last)
    if _all_ended_well(view, condition):
        return _succeeded("every worker ended with 0")
    if ends_with_its_agents and all(a.leaving for a in view.agents.values()):
        return _all_leave(view, condition, now_s)
    return None


def _begins_nowhere(view: JobView) -> str:
    """Returns why a job that never trained can begin on no node; empty if it can. A job that has trained waits for
    other nodes; one that has not would wait with a script that runs on none."""
    if view.has_trained or view.members or not view.agents or any(a.slots for a in view.agents.values()):
        return ""
    names = ", ".join(a.node_name for a in view.agents.values())
    return f"on every node ({names}) the workers of every slot ended before their first step, again and again"


def _all_leave(view: JobView, condition: JobCondition, now_s: float) -> Decision | None:
    if now_s < condition.missing_until_s and condition.missing:
        # other agents may only be putting their keys again
        reason = "waiting: all nodes that are there leave, others may come back"
        return Decision(None, reason, condition.missing_until_s)
    left = parting(view)
    if left is not None:
        return (
            _stopped(left.reason) if left.may_stop else Decision(None, f"not marked stopped: {left.reason}")
        )
    if not condition.present and view.generation is None and not view.has_trained:
        return _stopped("every node left before the first generation")
    return None


def _stopped(reason: str) -> Decision:
    return Decision(WriteResult(ResultOutcome.STOPPED, 0, reason), f"the job stops: {reason}")


def _awaiting_cause(
    view: JobView,
    condition: JobCondition,
    evidence: Evidence,
    doubtful: tuple[FailureView, ...],
    now_s: float,
    policy: Policy,
) -> Decision | None:
    """Asks whether all hosts live, and waits briefly for what else fails: a failure that only tells of another end is
    often the first to be known. None: nothing else is known to have ended."""
    since_s = max(f.seen_since_s for f in doubtful)
    inquiry = who_lives(view, evidence, agents_in_question(view, condition), since_s, now_s, policy)
    failed = f"a worker failed ({doubtful[0].summary})"
    if not inquiry.settled:
        return Decision(
            AskWhetherAlive(inquiry.ask) if inquiry.ask else None,
            f"{failed}; asking whether the other nodes live",
            inquiry.again_at_s,
        )
    # After a generation without a lost worker, the failed worker's agent reports that the loss explains the failure. So
    # it does where that generation was made without the failed worker, whose host was silent and has come back.
    record = view.generation
    was_left_out = record is not None and all(record.placement_of(f.worker_id) is None for f in doubtful)
    is_known_soon = view.attempts.newest_since_s > since_s or (
        was_left_out and all(f.was_member for f in doubtful)
    )
    until_s = since_s + (policy.cause_window_s if is_known_soon else policy.blame_window_s)
    return Decision(None, f"{failed}; waiting for what else fails", until_s) if now_s < until_s else None


def _misses_a_host(view: JobView, condition: JobCondition, evidence: Evidence) -> bool:
    """Tells whether an agent of the generations that may be in force is gone, or known to be dead."""
    records = (view.record(condition.in_force), view.generation)
    agents = {m.agent_id for g in records if g is not None for m in g.members}
    return any(a not in view.agents or evidence.is_dead(view.agents[a]) for a in agents)


def fail(reason: str) -> Decision:
    return _failed(reason, None)


def _failed(reason: str, failure: FailureView | None) -> Decision:
    return Decision(WriteResult(ResultOutcome.FAILED, 1, reason, failure), f"the job failed: {reason}")


def _succeeded(reason: str) -> Decision:
    return Decision(WriteResult(ResultOutcome.SUCCEEDED, 0, reason), f"the job succeeded: {reason}")


def _last_workers(view: JobView, condition: JobCondition) -> dict[str, str]:
    """Returns the workers of the generation in force, with their agents: those that must end well.

    Newcomers of a pending generation never trained, and those it leaves out may still be in force.
    """
    record = view.record(condition.in_force)
    if record is not None and record.members:
        return {m.worker_id: m.agent_id for m in record.members}
    if view.generation is not None and view.generation.members:
        return {
            m.worker_id: m.agent_id
            for m in view.generation.members
            if m.since_generation <= condition.in_force
        }
    return {s.worker_id: s.agent_id for s in condition.survivors}


def _all_ended_well(view: JobView, condition: JobCondition) -> bool:
    """Tells whether all ended with 0 without closing: a script that left its loop early, or that never trained."""
    workers = _last_workers(view, condition)
    if view.generation is not None:
        # One that ended since its node leaves has departed. Of one that finished the agent is needed no more.
        return bool(workers) and workers.keys() <= view.finished
    return not condition.present and _every_node_came_and_ended(view)


def _every_node_came_and_ended(view: JobView) -> bool:
    """Tells whether all workers have ended before the first record: a script may train nothing. Each node must have
    come, or one that starts late would do nothing; it may leave or be lost once its workers have ended."""
    stay = {a.agent_id: a.slots for a in view.agents.values() if not a.leaving}
    ended = Counter(view.finished_agents.values())
    others = [a for a in (*view.agents.values(), *view.gone.values()) if a.agent_id not in stay]
    done = [a for a in others if 0 < a.slots <= ended[a.agent_id]]
    return (
        view.wanted is not None
        and len(stay) + len(done) >= view.wanted.min_nodes
        and any(stay.values())
        # node by node: a worker that ended elsewhere says nothing of one that runs here
        and all(slots <= ended[agent_id] for agent_id, slots in stay.items())
    )


def _closing(
    view: JobView, condition: JobCondition, evidence: Evidence, now_s: float, policy: Policy
) -> Decision:
    workers = _last_workers(view, condition)
    ended = view.finished | view.departures.keys() | view.failures.keys()
    # At the end of its grace period a node goes without a record of its workers.
    cut_short = {w for w, a in workers.items() if w not in ended and a in view.gone and view.gone[a].leaving}
    asked = sorted(cut_short | (workers.keys() & view.departures.keys()))
    left = sorted(workers.keys() - ended - cut_short)
    failures = [view.failures[w] for w in workers if w in view.failures]
    if (first := first_cause(failures)) is not None:
        # On a node that leaves a worker is ended on purpose, maybe before this is known here. Its peers that fail by it
        # are no failures either.
        leaves = asked or any(workers[w] in view.agents and view.agents[workers[w]].leaving for w in left)
        if not leaves or not is_casualty(first.summary, first.traceback_tail):
            return _failed(f"a worker failed after training was done: {named_failure(first)}", first)
    if not left:
        if asked:  # on purpose, so it is no failure; what its script had yet to do was not done
            return _stopped(f"training was done, but {named(view, asked[:1])} left before its script ended")
        return _succeeded("training is done and every worker ended with 0")
    gone = [w for w in left if workers[w] not in view.agents or evidence.is_dead(view.agents[workers[w]])]
    if not gone:
        return Decision(
            None,
            f"closing: {len(left)} of {len(workers)} workers have yet to end, as {named(view, left[:1])}",
        )
    # Its agent may come back and say how it ended. A host lost here may have been writing the final model.
    since_s = evidence.waited_since_s(Waiting.ENDING, now_s)
    if now_s >= since_s + policy.holder_timeout_s:
        return fail(
            f"training was done, but the agents of {named(view, gone)} were lost before saying how these ended"
        )
    return Decision(
        None,
        f"closing: {named(view, gone)} have yet to end and their agents are gone",
        since_s + policy.holder_timeout_s,
        Waiting.ENDING,
    )
