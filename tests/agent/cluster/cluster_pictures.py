"""Small pictures of a cluster, written down in a line or two, for the tests of single rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from bagua_agent.cluster.cluster_plan import Plan
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import (
    ClusterView,
    DrainView,
    JobProgress,
    NodeView,
    OrderView,
    OutcomeView,
    SubmissionView,
    UnitState,
    UnitView,
)
from bagua_agent.cluster.scheduling import plan

POLICY = ClusterPolicy()
NOW_S = 1000.0


def node(name: str, slots: int = 4, *, labels: Mapping[str, str] | None = None, **more: object) -> NodeView:
    return NodeView(name, slots, labels or {}, **more)  # type: ignore[arg-type]


def nodes(names: str, slots: int = 4) -> list[NodeView]:
    return [node(n, slots) for n in names.split()]


def job(name: str, least: int = 1, most: int | None = None, slots: int = 0, **more: object) -> SubmissionView:
    return SubmissionView(name, least, most or least, slots, **more)  # type: ignore[arg-type]


def unit(
    name: str, slots: Iterable[int] = (0,), state: UnitState = UnitState.RUNNING, **more: object
) -> UnitView:
    return UnitView(name, state, tuple(slots), **more)  # type: ignore[arg-type]


def picture(
    nodes: Iterable[NodeView],
    *jobs: SubmissionView,
    orders: Mapping[str, str] | None = None,
    running: str = "",
    **more: object,
) -> ClusterView:
    """orders: node to "job:slots:number ..."; each is carried out, by a unit that lives and works. running: jobs that
    have begun."""
    listed = {n: tuple(_order(o) for o in text.split()) for n, text in (orders or {}).items()}
    seen = {}
    for n in nodes:
        units, first = list(n.units), 0
        for order in listed.get(n.node_name, ()):
            if n.unit(order.job_id) is None:
                units.append(unit(order.job_id, range(first, first + order.slots), order=order.number))
            first += order.slots
        seen[n.node_name] = replace(n, units=tuple(units))
    progress = {
        j.job_id: JobProgress(
            j.job_id in running.split(),
            frozenset(n for n, os in listed.items() if any(o.job_id == j.job_id for o in os)),
        )
        for j in jobs
    }
    return ClusterView(seen, jobs, listed, progress, **more)  # type: ignore[arg-type]


def _order(text: str) -> OrderView:
    job_id, slots, number = text.split(":")
    return OrderView(job_id, int(slots), int(number))


def planned(view: ClusterView, now_s: float = NOW_S) -> Plan:
    return plan(view, now_s, POLICY)


def changes_nothing(todo: Plan) -> bool:
    return not todo.orders and not todo.outcomes


def where(view: ClusterView, now_s: float = NOW_S) -> dict[str, str]:
    """Job to its nodes once the plan is carried out, "n1 n2"; jobs without any are not in it."""
    todo = planned(view, now_s)
    found: dict[str, list[str]] = {}
    for name in sorted(view.nodes.keys() | view.orders.keys()):
        for order in todo.orders.get(name, view.orders.get(name, ())):
            found.setdefault(order.job_id, []).append(name)
    return {job_id: " ".join(names) for job_id, names in sorted(found.items())}


def with_node(view: ClusterView, name: str, **changes: object) -> ClusterView:
    changed = replace(view.nodes[name], **changes)  # type: ignore[arg-type]
    return replace(view, nodes={**view.nodes, name: changed})


def with_unit(view: ClusterView, name: str, changed: UnitView | None, job_id: str) -> ClusterView:
    """The node reports this of the job instead."""
    others = tuple(u for u in view.nodes[name].units if u.job_id != job_id)
    return with_node(view, name, units=(*others, *([changed] if changed else [])))


def with_progress(view: ClusterView, job_id: str, **changes: object) -> ClusterView:
    before = view.progress.get(job_id, JobProgress())
    return replace(view, progress={**view.progress, job_id: replace(before, **changes)})  # type: ignore[arg-type]


def drained(view: ClusterView, name: str, *, force: bool = False) -> ClusterView:
    return with_node(view, name, drain=DrainView(force, "new disk"))


def absent(view: ClusterView, name: str, since_s: float = NOW_S) -> ClusterView:
    return with_node(view, name, present=False, absent_since_s=since_s)


def ended(view: ClusterView, job_id: str, end: OutcomeView, *, written: bool = False) -> ClusterView:
    if written:
        return replace(view, outcomes={**view.outcomes, job_id: end})
    return with_progress(view, job_id, result=end)
