"""Says in one line what happens in a cluster, why, and what to do next. Pure: the first rule that applies wins.

Rules go from what stops the whole cluster over what stops a node or a job to what makes jobs wait. Reasons are the
scheduler's own.
"""

from __future__ import annotations

from collections.abc import Callable

from bagua_agent.base.plain_text import counted, duration, shortened, some
from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.observation.cluster_facts import ClusterFacts
from bagua_agent.observation.cluster_status import JobStatus, NodeStatus
from bagua_agent.observation.verdict_parts import Level, Verdict

FAILED_LATELY_S = 600.0
_MOST_NAMES = 4


def cluster_verdict(facts: ClusterFacts) -> Verdict:
    for rule in _RULES:
        found = rule(facts)
        if found is not None:
            return found
    raise AssertionError("the last rule always applies")


def present(facts: ClusterFacts) -> list[NodeStatus]:
    return [node for node in facts.status.nodes if node.state != "absent"]


def drain_is_under_way(node: NodeStatus) -> bool:
    return node.state == "drained" and node.taken > 0


def _no_nodes(facts: ClusterFacts) -> Verdict | None:
    if present(facts):
        return None
    jobs = [job for job in facts.status.jobs if job.state != JobState.ENDED.value]
    waits = f" {counted(len(jobs), 'submitted job')} can't run." if jobs else ""
    if facts.status.nodes:
        names = some((node.node_name for node in facts.status.nodes), _MOST_NAMES)
        next_step = "Look at the service bagua-agent of these nodes, and at the network from them to etcd."
        return Verdict(Level.BAD, f"No daemon is heard of.{waits}", f"Silent: {names}.", next_step)
    if jobs:
        return Verdict(
            Level.BAD,
            f"No daemon runs.{waits}",
            "No node has a key in etcd.",
            "Start `bagua-agent serve` on a node.",
        )
    next_step = "Start `bagua-agent serve` on each node; docs/cluster.md says how."
    return Verdict(
        Level.WAITING, "No daemon runs in this cluster yet.", "No node has a key in etcd.", next_step
    )


def _no_scheduler(facts: ClusterFacts) -> Verdict | None:
    if facts.status.scheduler:
        return None
    return Verdict(
        Level.BAD,
        "No daemon schedules: submitted jobs do not start, and lost nodes are not replaced.",
        "The scheduler's key in etcd is free. Jobs that run go on, and another daemon takes the key within seconds.",
        "If this stays, read the daemons' logs: one of them says why it can't schedule.",
    )


def _silent_nodes(facts: ClusterFacts) -> Verdict | None:
    silent = [node for node in facts.status.nodes if node.state == "absent"]
    if not silent:
        return None
    jobs = sorted(
        {job_id for node in silent for job_id, _, state in node.jobs if state in ("running", "leaving")}
    )
    losing = f" It ran {'job' if len(jobs) == 1 else 'jobs'} {some(jobs, _MOST_NAMES)}." if jobs else ""
    one, longest_s = len(silent) == 1, max(node.absent_s for node in silent)
    since = "since this page was opened" if longest_s > 1e8 else f"for {duration(longest_s)}"
    names = some((node.node_name for node in silent), _MOST_NAMES)
    return Verdict(
        Level.WARNING,
        f"{'Node' if one else 'Nodes'} {names} {'has' if one else 'have'} been silent {since}.",
        f"The daemon has ended, or its host or network is down.{losing} After 15 s jobs get other nodes, where there "
        "are any.",
        "Look at that host: is it up, does its service bagua-agent run, does it reach etcd?",
    )


def _nodes_in_trouble(facts: ClusterFacts) -> Verdict | None:
    found = [node for node in facts.status.nodes if node.state == "trouble"]
    if not found:
        return None
    names = some((node.node_name for node in found), _MOST_NAMES)
    one = len(found) == 1
    return Verdict(
        Level.WARNING,
        f"{'Node' if one else 'Nodes'} {names} {'gets' if one else 'get'} no jobs: {shortened(found[0].reason)}",
        "The daemon checks its node every minute, and takes it out while a fault lasts.",
        f"Run `bagua-agent check` on {found[0].node_name}; it says what to mend.",
    )


def _failed_lately(facts: ClusterFacts) -> Verdict | None:
    since_s, ends = facts.at_unix_s - FAILED_LATELY_S, facts.ends_unix_s
    failed = [
        job
        for job in facts.status.jobs
        if job.exit_code and not job.reason.startswith("stopped") and ends.get(job.job_id, 0.0) >= since_s
    ]
    if not failed:
        return None
    newest = max(failed, key=lambda job: ends[job.job_id])
    more = f" ({len(failed)} jobs within ten minutes)" if len(failed) > 1 else ""
    return Verdict(
        Level.WARNING,
        f"Job {newest.job_id} has {shortened(newest.reason)}{more}",
        "Its page shows what failed first.",
        f"`bagua-launch logs {newest.job_id}` prints the output of its workers.",
    )


def _does_not_fit(facts: ClusterFacts) -> Verdict | None:
    found = [job for job in facts.queue if not job.fits]
    if not found:
        return None
    return Verdict(
        Level.WARNING,
        f"Job {found[0].job_id} can't start on this cluster{_and_more(found)}.",
        _sentence(found[0].reason),
        f"Add such nodes, or stop the job and submit it with fewer: `bagua-launch stop {found[0].job_id}`.",
    )


def _waits(facts: ClusterFacts) -> Verdict | None:
    queue = facts.queue
    if not queue:
        return None
    first = queue[0]
    start_s = facts.starts_in_s.get(first.job_id)
    when = f" It is expected to start in {duration(start_s)}." if start_s is not None else ""
    drained = [node.node_name for node in facts.status.nodes if node.state == "drained"]
    follows = (
        "Nothing: it starts once nodes are free. A higher --priority, or a stopped job, makes it earlier."
    )
    if drained:
        follows = (
            f"{some(drained, _MOST_NAMES)} is drained: `bagua-launch undrain {drained[0]}` gives it back."
        )
    count = "1 job waits" if len(queue) == 1 else f"{len(queue)} jobs wait"
    return Verdict(
        Level.WAITING,
        f"{_running(facts)}; {count}, {first.job_id} first.",
        _sentence(first.reason) + when,
        follows,
    )


def _drains(facts: ClusterFacts) -> Verdict | None:
    found = [node for node in facts.status.nodes if drain_is_under_way(node)]
    if not found:
        return None
    jobs = sorted(
        {job_id for node in found for job_id, _, state in node.jobs if state in ("running", "leaving")}
    )
    names = some((node.node_name for node in found), _MOST_NAMES)
    return Verdict(
        Level.WAITING,
        f"{names} is being drained: {some(jobs, _MOST_NAMES)} has yet to leave.",
        "A job leaves a drained node at a step boundary, and not before its other nodes are enough.",
        "Nothing, unless it lasts: then `bagua-launch drain --force` lets the job wait for a node instead.",
    )


def _goes_on(facts: ClusterFacts) -> Verdict:
    nodes, drained = present(facts), [n.node_name for n in facts.status.nodes if n.state == "drained"]
    free = sum(n.slots - n.taken for n in nodes if n.state == "ready")
    why = f"{counted(free, 'slot')} of {sum(n.slots for n in nodes)} {'is' if free == 1 else 'are'} free."
    if drained:
        why += f" {some(drained, _MOST_NAMES)} is drained and gets no jobs."
    follows = "" if facts.going else "`bagua-launch submit` starts a job."
    return Verdict(Level.GOOD, f"{_running(facts)}.", why, follows)


def _running(facts: ClusterFacts) -> str:
    going = facts.going
    nodes = {name for job in going for name in job.nodes}
    there = counted(len(present(facts)), "node")
    if not going:
        return f"No job runs on the {there}"
    return f"{counted(len(going), 'job')} {'runs' if len(going) == 1 else 'run'} on {len(nodes)} of {there}"


def _and_more(found: list[JobStatus]) -> str:
    return f", and {counted(len(found) - 1, 'other job')} neither" if len(found) > 1 else ""


def _sentence(reason: str) -> str:
    """Returns a reason of the scheduler's, which begins with a verb, as a sentence."""
    return f"It {reason}." if reason else ""


_RULES: tuple[Callable[[ClusterFacts], Verdict | None], ...] = (
    _no_nodes,
    _no_scheduler,
    _silent_nodes,
    _nodes_in_trouble,
    _failed_lately,
    _does_not_fit,
    _waits,
    _drains,
    _goes_on,
)
