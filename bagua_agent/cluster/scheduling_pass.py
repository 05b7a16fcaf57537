"""Makes one pass over all jobs in their order, which gives nodes to each: the phases of scheduling.py.

Its decisions are in the ledger that it returns; its findings are kept for the explanations to people (reasons.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from bagua_agent.cluster import node_release
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView, JobProgress, OutcomeView, SubmissionView
from bagua_agent.cluster.gang_start import give_all, give_free, give_free_whole
from bagua_agent.cluster.growth import grow
from bagua_agent.cluster.job_ends import asked_to_leave_at_s, known_end, still_ends, stopped
from bagua_agent.cluster.orders_in_force import why_leave, why_over
from bagua_agent.cluster.slot_ledger import Holding, Ledger


@dataclass(frozen=True, slots=True)
class Shortage:
    """A job that could not be given its minimum. found: nodes there would have been. fitting: nodes it could use if
    no other job were there. behind: jobs that wait before it for nodes that it could use."""

    found: int
    fitting: int
    behind: tuple[str, ...] = ()


@dataclass(slots=True)
class Considered:
    """The findings of one pass. ended: how, by job. stopping: jobs asked to stop that are not over. stops: outcomes of
    jobs that have stopped. shortages: by job. gone: why orders went at once, by job."""

    ledger: Ledger
    ended: dict[str, OutcomeView] = field(default_factory=dict)
    stopping: list[SubmissionView] = field(default_factory=list)
    stops: dict[str, OutcomeView] = field(default_factory=dict)
    shortages: dict[str, Shortage] = field(default_factory=dict)
    gone: dict[str, list[str]] = field(default_factory=dict)

    @property
    def outcomes(self) -> Mapping[str, OutcomeView]:
        """The outcomes that the store does not have yet."""
        written = self.ledger.view.outcomes
        return {job_id: end for job_id, end in (self.ended | self.stops).items() if job_id not in written}


def consider(view: ClusterView, now_s: float, policy: ClusterPolicy, number: int) -> Considered:
    """Makes one pass over all jobs, and returns its findings. number: of the orders that come new."""
    ledger = Ledger(view, now_s, policy, number)
    found = Considered(ledger)
    _withdraw_of_earlier_jobs(ledger)
    _who_ends(found)
    _who_stays_where(found)
    active = sorted(ledger.holdings.values(), key=lambda h: h.rank)
    waiting = [h for h in active if not h.begun and not h.kept]
    for holding in active:
        if holding.begun and holding.lacking:
            _fill_up(found, holding)
    for holding in active:
        if (
            not holding.begun
            and holding.kept
            and holding.lacking
            and not give_all(ledger, holding, holding.lacking).enough
        ):
            for node_name in list(holding.kept):
                ledger.take(holding.job.job_id, node_name)
            waiting.append(holding)
    for holding in sorted(waiting, key=lambda h: h.rank):
        start = give_all(ledger, holding, holding.lacking)
        if not start.enough:
            _wait(found, holding, start.count)
    _to_allowed_sizes(found, active)
    grow(ledger, [h for h in active if not h.lacking])
    return found


def _to_allowed_sizes(found: Considered, active: list[Holding]) -> None:
    """Gives jobs between two sizes the nodes to the next one whole, or takes those above the last one back. active: by
    rank."""
    ledger = found.ledger
    between = [h for h in active if h.room.limited and h.beyond]
    while between:
        between = [h for h in between if not give_free_whole(ledger, h, h.step)]
        if not between:
            return
        last = between.pop()
        size = last.room.fit(len(last.lasting))
        why = f"its allowed sizes are {last.job.size_policy.text}"
        given = [f"{n} is given back: {why}" for n in node_release.down_to(ledger, last, size)]
        if given:
            found.gone.setdefault(last.job.job_id, []).extend(given)


def _withdraw_of_earlier_jobs(ledger: Ledger) -> None:
    """Withdraws the orders of removed jobs whose names were submitted again: their slots and nodes are not what the
    new job asked for."""
    for job in ledger.view.submissions:
        nodes = ledger.nodes_of[job.job_id]
        _withdraw(
            ledger,
            job.job_id,
            sorted(n for n in nodes if ledger.orders[n][job.job_id].is_of_another(job.nonce)),
        )


def _who_ends(found: Considered) -> None:
    ledger, view = found.ledger, found.ledger.view
    asked = {s.job_id: s for s in view.submissions}
    for job_id in sorted(
        asked.keys() | {j for j, nodes in ledger.nodes_of.items() if nodes} | view.outcomes.keys()
    ):
        end = known_end(view, job_id)
        job = asked.get(job_id)
        if end is not None:
            found.ended[job_id] = end
            if ledger.now_s >= asked_to_leave_at_s(view, job_id, ledger.policy):
                _withdraw(ledger, job_id, sorted(ledger.nodes_of[job_id]))
        elif job is not None and job.stop:
            found.stopping.append(job)
        elif job_id in view.removed:
            # an order that came too late, or was put back with what the store had lost
            _withdraw(ledger, job_id, sorted(ledger.nodes_of[job_id]))
            continue
        else:
            continue
        over = [
            n
            for n in ledger.nodes_of[job_id]
            if not still_ends(ledger.nodes[n], job_id, ledger.now_s, ledger.policy)
        ]
        _withdraw(ledger, job_id, sorted(over))
        if end is None and job is not None and not ledger.nodes_of[job_id]:
            outcome = stopped(view, job, ledger.now_s, ledger.policy)
            if outcome is not None:
                found.stops[job_id] = outcome


def _withdraw(ledger: Ledger, job_id: str, nodes: list[str]) -> None:
    for node_name in nodes:
        ledger.take(job_id, node_name)


def _who_stays_where(found: Considered) -> None:
    ledger, view = found.ledger, found.ledger.view
    for place, job in enumerate(view.submissions):
        if job.stop or job.job_id in found.ended:
            continue
        progress = view.progress.get(job.job_id, JobProgress())
        holding = ledger.holdings[job.job_id] = _holding(job, place, progress)
        for node_name in sorted(ledger.nodes_of[job.job_id]):
            node, order = ledger.nodes[node_name], ledger.orders[node_name][job.job_id]
            over = why_over(order, node, node.unit(job.job_id), ledger.now_s, ledger.policy)
            if over:
                ledger.take(job.job_id, node_name)
                found.gone.setdefault(job.job_id, []).append(over)
                continue
            leave = why_leave(node)
            if leave:
                holding.left[node_name] = leave
            else:
                holding.kept[node_name] = order
        for node_name in [*holding.kept, *holding.left]:
            ledger.note_sure(holding, node_name)
        node_release.what_it_should_leave(ledger, holding)
        node_release.down_to(ledger, holding, holding.room.most)


def _holding(job: SubmissionView, place: int, progress: JobProgress) -> Holding:
    policy = job.size_policy
    least, most = policy.bounds(job.min_nodes, job.max_nodes)
    if not progress.begun:
        least = policy.least_to_start(least, most)
    room = policy.room(job.min_nodes, job.max_nodes)
    replicas: defaultdict[str, list[frozenset[str]]] = defaultdict(list)
    for nodes in progress.replicas:
        for node_name in nodes:
            replicas[node_name].append(nodes)
    return Holding(job, place, least, room, progress.begun, progress.arrived, replicas=replicas)


def _fill_up(found: Considered, holding: Holding) -> None:
    ledger = found.ledger
    if give_all(ledger, holding, holding.lacking).enough:
        return
    give_free(ledger, holding, holding.lacking)
    _wait(found, holding, len(holding.lasting))


def _wait(found: Considered, holding: Holding, count: int) -> None:
    """Notes what is missing, and keeps the jobs behind this one away from what would help it."""
    ledger = found.ledger
    fitting = ledger.fitting(holding.job)
    behind = {claimer for n in fitting if (claimer := ledger.claimed.get(n)) is not None}
    found.shortages[holding.job.job_id] = Shortage(count, len(fitting), tuple(sorted(behind)))
    if len(fitting) < holding.least:
        return  # it does not fit even an empty cluster: those behind need not wait for it
    for node_name in fitting:
        ledger.claimed.setdefault(node_name, holding.job.job_id)
