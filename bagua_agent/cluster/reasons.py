"""Explains the state of each job in one sentence that a person can act on. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagua_agent.base.plain_text import counted, first_of, some
from bagua_agent.cluster.cluster_plan import JobPlan, JobState
from bagua_agent.cluster.cluster_view import ClusterView, SubmissionView, UnitState
from bagua_agent.cluster.scheduling_pass import Considered, Shortage
from bagua_agent.cluster.slot_ledger import Holding, has_labels, needed

MOST_NAMES = 3


def unsettled(view: ClusterView) -> dict[str, JobPlan]:
    """Returns a plan without a decision for every job of a picture that may not be whole yet."""
    nodes: dict[str, list[str]] = {s.job_id: [] for s in view.submissions}
    for node_name in sorted(view.orders):
        for order in view.orders[node_name]:
            nodes.setdefault(order.job_id, []).append(node_name)
    reason = "nothing is decided yet: the scheduler has just begun to look, or the store lost its keys"
    stop = {s.job_id for s in view.submissions if s.stop}
    plans = {}
    for job_id, names in nodes.items():
        progress = view.progress.get(job_id)
        if job_id in view.outcomes or (progress is not None and progress.result is not None):
            state = JobState.ENDED
        elif job_id in stop:
            state = JobState.STOPPING
        elif not names:
            state = JobState.QUEUED
        else:
            state = JobState.RUNNING if progress is not None and progress.begun else JobState.STARTING
        plans[job_id] = JobPlan(state, reason, tuple(names))
    return plans


def job_plans(found: Considered) -> dict[str, JobPlan]:
    ledger = found.ledger
    plans: dict[str, JobPlan] = {}
    for job_id, end in found.ended.items():
        nodes = tuple(sorted(ledger.nodes_of[job_id]))
        reason = f"{end.end.name.lower()} with exit code {end.exit_code}{_detail(end.reason, ': ')}"
        if nodes:
            reason += f"; still ends on {some(nodes, MOST_NAMES)}"
        plans[job_id] = JobPlan(JobState.ENDED, reason, nodes)
    for job in found.stopping:
        nodes = tuple(sorted(ledger.nodes_of[job.job_id]))
        stop = found.stops.get(job.job_id)
        if stop is not None:
            plans[job.job_id] = JobPlan(JobState.ENDED, stop.reason)
        else:
            where = (
                f"has yet to leave {some(nodes, MOST_NAMES)}" if nodes else "its last units have yet to end"
            )
            plans[job.job_id] = JobPlan(JobState.STOPPING, f"was asked to stop; {where}", nodes)
    sentences = _Sentences(found)
    for job_id, holding in ledger.holdings.items():
        plans[job_id] = sentences.of(holding)
    for job_id, names in ledger.nodes_of.items():
        if names and job_id not in plans:
            reason = (
                "runs, but its submission is unknown, so nothing is changed; submit it again to manage it"
            )
            plans[job_id] = JobPlan(JobState.RUNNING, reason, tuple(sorted(names)))
    return plans


class _Sentences:
    """Makes the sentences about jobs that are to run. going: jobs on their way off a node, by node. absent: nodes
    without a report."""

    def __init__(self, found: Considered) -> None:
        self.found, self.ledger = found, found.ledger
        self.going: dict[str, list[str]] = {}
        self.absent: list[str] = []
        stopping = {job.job_id for job in found.stopping}
        for name, node in self.ledger.nodes.items():
            if not node.present:
                self.absent.append(name)
                continue
            ending = [j for j in self.ledger.orders[name] if j in found.ended or j in stopping]
            jobs = sorted([*self.ledger.leaving(name), *ending])
            if jobs:
                self.going[name] = jobs

    def of(self, holding: Holding) -> JobPlan:
        job = holding.job
        nodes = tuple(sorted(holding.kept.keys() | holding.left.keys()))
        shortage = self.found.shortages.get(job.job_id)
        if not nodes:
            lost = "had begun and has no node any more; " if holding.begun else ""
            shortage = shortage or Shortage(0, 0)
            fits = shortage.fitting >= holding.least
            return JobPlan(JobState.QUEUED, lost + self._waits(holding, shortage), fits=fits)
        verb, state = ("runs", JobState.RUNNING) if holding.begun else ("starts", JobState.STARTING)
        parts = [
            f"{verb} on {some(nodes, MOST_NAMES)} ({len(nodes)} of {job.min_nodes} to {job.max_nodes} nodes)"
        ]
        if shortage is not None:
            short = "has no replacement yet" if len(nodes) >= holding.least else "is below its minimum"
            parts.append(f"{short}: {self._waits(holding, shortage)}")
        if holding.left:
            whys = ", ".join(_first([holding.left[n] for n in sorted(holding.left)]))
            parts.append(f"{whys}; left once another node is ready instead")
        if holding.room.limited and holding.step and shortage is None:
            size, more = len(holding.lasting) + holding.step, counted(holding.step, "more node")
            parts.append(f"grows to {size} nodes, its next allowed size, once {more} can be had")
        parts += _first(self.found.gone.get(job.job_id, []))
        troubles = self._troubles(job, nodes)
        parts += _first(troubles)
        if not holding.begun and not troubles:
            parts.append("waits for its first generation")
        return JobPlan(state, "; ".join(parts), nodes)

    def _troubles(self, job: SubmissionView, nodes: Iterable[str]) -> list[str]:
        """Returns what keeps the job from being on nodes that it was promised."""
        troubles = []
        for name in nodes:
            node = self.ledger.nodes[name]
            unit = node.unit(job.job_id)
            if not node.present:
                troubles.append(f"{name} is not heard of")
            elif unit is not None and unit.failures and not unit.alive:
                times = f"{counted(unit.failures, 'failure')} in a row"
                troubles.append(f"{name} is tried again after {times}{_detail(unit.reason, ': ')}")
            elif name in self.going and (unit is None or unit.state is UnitState.WAITING):
                troubles.append(_given_back(name, self.going[name]))
        return troubles

    def _waits(self, holding: Holding, shortage: Shortage) -> str:
        job = holding.job
        if shortage.fitting < holding.least:
            return self._does_not_fit(holding, shortage)
        parts = [f"waits for {holding.least - shortage.found} of {_kind(holding)}"]
        returning = [_given_back(n, jobs) for n, jobs in self.going.items() if self.ledger.fits(job, n)]
        missing = [f"{n} is not heard of" for n in self.absent if self.ledger.fits(job, n)]
        parts += _first(returning) + _first(missing)
        if shortage.behind:
            verb = "wait" if len(shortage.behind) > 1 else "waits"
            parts.append(f"{_jobs(shortage.behind)} {verb} for such nodes first")
        elif not returning and not missing:
            parts.append("the others are used by jobs that can spare none")
        return "; ".join(parts)

    def _does_not_fit(self, holding: Holding, shortage: Shortage) -> str:
        """Explains what would help a job that nothing that ends here would help."""
        job = holding.job
        nodes = self.ledger.nodes.values()
        labelled = [n for n in nodes if has_labels(job, n)]
        out = self.ledger.left_out.get(job.job_id, {})
        whys = [f"{n} is left out ({why})" for n, why in out.items() if not self.ledger.why_unfit(job)[n]]
        if labelled and needed(job, max(labelled, key=lambda n: n.slots)) > max(n.slots for n in labelled):
            whys.append(f"the largest has {max(n.slots for n in labelled)} slots")
        else:
            if len(labelled) < holding.least:
                have = "have the labels" if job.labels else "are known"
                whys.append(f"{len(labelled)} of {len(nodes)} nodes {have}")
            unfit = self.ledger.why_unfit(job)
            whys += [unfit[n.node_name] for n in labelled if unfit[n.node_name]]
        return "; ".join(
            [f"needs {_kind(holding)}, and there are {shortage.fitting} it could use", *_first(whys)]
        )


def _given_back(node_name: str, jobs: Sequence[str]) -> str:
    return f"node {node_name} is being given back by {_jobs(jobs)}"


def _kind(holding: Holding) -> str:
    job = holding.job
    slots = counted(job.slots_per_node, "free slot") if job.slots_per_node else "all slots free"
    labels = " and " + ", ".join(f"{k}={v}" for k, v in sorted(job.labels.items())) if job.labels else ""
    return f"{counted(holding.least, 'node')} with {slots}{labels}"


def _jobs(names: Sequence[str]) -> str:
    return f"{'job' if len(names) == 1 else 'jobs'} {some(names, MOST_NAMES)}"


def _detail(reason: str, joint: str) -> str:
    return joint + reason if reason else ""


def _first(sentences: Sequence[str]) -> list[str]:
    return first_of(sentences, MOST_NAMES, "like that")
