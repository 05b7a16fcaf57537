"""What must never happen in a simulated cluster, checked after each plan with rules written down here anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bagua_agent.cluster.cluster_plan import JobState, Plan
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
)
from bagua_agent.cluster.orders_in_force import in_force
from bagua_agent.cluster.scheduling import plan

# the last two are days in truth: histories take minutes
POLICY = ClusterPolicy(left_out_s=60.0, put_back_within_s=8.0, orders_kept_s=8.0)


def whole(names: set[str], progress: JobProgress) -> set[str]:
    """Those whose replicas are not all broken when only these nodes are there."""
    broken = [r for r in progress.replicas if not r <= names]
    return {
        n
        for n in names
        if any(n in r for r in progress.replicas if r <= names) or not any(n in r for r in broken)
    }


@dataclass
class CheckedCluster:
    """What is true of the cluster, as far as the rules need it."""

    now_s: float = 100.0
    submissions: dict[str, SubmissionView] = field(default_factory=dict)
    outcomes: dict[str, OutcomeView] = field(default_factory=dict)
    results: dict[str, OutcomeView] = field(default_factory=dict)
    drains: dict[str, DrainView] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def least(self, job: SubmissionView) -> int:
        """Nodes that it needs now: a job of sizes has both ends of its range among them."""
        if job.job_id in self.begun:
            return job.min_nodes
        return max(job.min_nodes, min(job.size_policy.start_size, job.max_nodes))

    def check(self, view: ClusterView, todo: Plan) -> None:
        if self.now_s < view.since_s + POLICY.settle_s:
            assert not todo.orders and not todo.outcomes
            assert todo.again_at_s == view.since_s + POLICY.settle_s
            return
        assert todo == plan(self.shuffled(view), self.now_s, POLICY), "another scheduler decides otherwise"
        before = {n: {o.job_id: o for o in in_force(view, n)} for n in view.nodes}
        after = {n: {o.job_id: o for o in todo.orders.get(n, in_force(view, n))} for n in view.nodes}
        held_before = Counter(j for orders in before.values() for j in orders)
        held_after = Counter(j for orders in after.values() for j in orders)
        applied = replace(
            view,
            orders={**view.orders, **todo.orders},
            outcomes={**view.outcomes, **todo.outcomes},
        )
        again = plan(applied, self.now_s, POLICY)
        assert not again.orders and not again.outcomes, f"not settled: {again.orders} {again.outcomes}"
        for node_name, orders in todo.orders.items():
            node = view.nodes[node_name]
            new = [j for j in orders if before[node_name].get(j.job_id) != j]
            for order in new:
                job = self.submissions[order.job_id]
                unit = node.unit(order.job_id)
                assert self.can_use(job, node), f"{order} does not belong on {node}"
                assert node.present and order.slots == (job.slots_per_node or node.slots)
                assert unit is None or unit.alive or unit.failures < POLICY.failures_before_left_out
                assert order.number > max((o.number for os in view.orders.values() for o in os), default=0)
            assert not new or sum(o.slots for o in orders) <= node.slots, "promised twice"
        for job_id, job in self.submissions.items():
            if job_id in todo.outcomes:
                assert job_id in self.results or job.stop
            if job.stop or job_id in self.outcomes or job_id in self.results:
                assert not any(job_id in after[n] and job_id not in before[n] for n in after)
                continue
            progress = view.progress[job_id]
            if not progress.begun:
                assert held_after[job_id] == 0 or held_after[job_id] >= self.least(job), "a part of a gang"
            self.check_minimum(view, job, before, after, progress)
            self.check_size(view, job, after, progress)
            held = {n for n in after if job_id in after[n]}
            replaced = held - self.lasting(view, held, progress)
            assert held_after[job_id] <= max(job.max_nodes, held_before[job_id]) + len(replaced)
        self.check_growth(view, todo, before, after, held_before)
        self.check_first_in_line(view, todo, after)

    def check_minimum(
        self,
        view: ClusterView,
        job: SubmissionView,
        before: Mapping[str, Mapping[str, OrderView]],
        after: Mapping[str, Mapping[str, OrderView]],
        progress: JobProgress,
    ) -> None:
        """No running job is taken below its minimum."""

        def over(name: str) -> bool:
            node, drain = view.nodes[name], self.drains.get(name)
            lost = not node.present and self.now_s >= node.absent_since_s + POLICY.node_lost_s
            return lost or (drain is not None and drain.force)

        held = {n for n in before if job.job_id in before[n]}
        removed = [n for n in held if job.job_id not in after[n]]
        well = {n for n in held if not over(n)}
        hurts = [n for n in removed if n in progress.arrived and n in whole(well, progress)]
        for name in list(hurts):
            unit = view.nodes[name].unit(job.job_id)
            if unit is not None and unit.state in (UnitState.ENDED, UnitState.REFUSED):
                hurts.remove(name)
        if progress.begun and hurts:
            self.seen["gave back"] += 1
            works = self.working(view, job, after, progress)
            assert len(works) >= job.min_nodes, f"{job.job_id} is taken below its minimum: {hurts}"

    def check_size(
        self,
        view: ClusterView,
        job: SubmissionView,
        after: Mapping[str, Mapping[str, OrderView]],
        progress: JobProgress,
    ) -> None:
        """Nodes that a job need not leave are an allowed number, where it has enough and may lose one."""
        well = self.lasting(view, {n for n in after if job.job_id in after[n]}, progress)
        sizes, least = job.size_policy.sizes, self.least(job)
        if not sizes or len(well) < least:
            return
        self.seen["a job of sizes"] += 1
        if len(well) not in sizes:
            self.seen["between two sizes"] += 1
            for name in well:
                assert progress.begun and name in progress.arrived
                others = whole(self.working(view, job, after, progress) - {name}, progress)
                assert len(others) < least, f"{job.job_id} holds {len(well)} nodes of {sizes}"

    def lasting(self, view: ClusterView, held: set[str], progress: JobProgress) -> set[str]:
        """Nodes that the job need not leave, and that it does not lose with one that it should leave."""
        ill = {n for n in held if view.nodes[n].troubles or n in self.drains}
        working = whole(held, progress)
        lost = {n for n in working if any(n in r for r in progress.replicas)} - whole(held - ill, progress)
        if lost - ill:
            self.seen["a whole replica is replaced"] += 1
        return held - ill - lost

    def working(
        self,
        view: ClusterView,
        job: SubmissionView,
        after: Mapping[str, Mapping[str, OrderView]],
        progress: JobProgress,
    ) -> set[str]:
        runs = {
            n
            for n in after
            if job.job_id in after[n]
            and n in progress.arrived
            and view.nodes[n].present
            and (u := view.nodes[n].unit(job.job_id)) is not None
            and u.state is UnitState.RUNNING
        }
        return whole(runs, progress)

    def check_growth(
        self,
        view: ClusterView,
        todo: Plan,
        before: Mapping[str, Mapping[str, OrderView]],
        after: Mapping[str, Mapping[str, OrderView]],
        held_before: Counter[str],
    ) -> None:
        waiting = [
            self.submissions[j]
            for j, p in todo.jobs.items()
            if p.state is JobState.QUEUED and self.fits(view, self.submissions[j])
        ]
        given: dict[str, list[str]] = {}
        for name in after:
            for job_id in after[name].keys() - before[name].keys():
                given.setdefault(job_id, []).append(name)
        for job_id, names in given.items():
            job = self.submissions[job_id]
            well = self.lasting(view, {n for n in after if job_id in after[n]}, view.progress[job_id])
            if len(well) > job.min_nodes and held_before[job_id] >= job.min_nodes:
                self.seen["grew"] += 1
                for other in waiting:
                    assert not any(self.can_use(other, view.nodes[n]) for n in names), (
                        "grew while a job waits"
                    )

    def check_first_in_line(
        self, view: ClusterView, todo: Plan, after: Mapping[str, Mapping[str, OrderView]]
    ) -> None:
        """A job that waits and could have free nodes gets them, unless an earlier job waits for them."""
        queue = [j for j in self.submissions.values() if todo.jobs[j.job_id].state is JobState.QUEUED]
        for job in sorted(queue, key=lambda j: -j.priority)[:1]:
            short = [
                j for j, p in todo.jobs.items() if p.state is JobState.RUNNING and "waits for" in p.reason
            ]
            free = [
                n
                for n, node in view.nodes.items()
                if node.present
                and self.can_use(job, node)
                and node.slots - sum(o.slots for o in after[n].values()) >= (job.slots_per_node or node.slots)
            ]
            assert short or len(free) < self.least(job), f"{job.job_id} waits beside {free}"

    def can_use(self, job: SubmissionView, node: NodeView) -> bool:
        unit = node.unit(job.job_id)
        out = unit is not None and (
            unit.state is UnitState.REFUSED
            or (not unit.alive and unit.failures >= POLICY.failures_before_left_out)
        )
        lost = not node.present and self.now_s >= node.absent_since_s + POLICY.node_lost_s
        return (
            not out
            and not lost
            and not node.troubles
            and node.node_name not in self.drains
            and all(node.labels.get(k) == v for k, v in job.labels.items())
            and 0 < (job.slots_per_node or node.slots) <= node.slots
        )

    def fits(self, view: ClusterView, job: SubmissionView) -> bool:
        return sum(self.can_use(job, n) for n in view.nodes.values()) >= self.least(job)

    def shuffled(self, view: ClusterView) -> ClusterView:
        def mixed(mapping: Mapping[str, object]) -> dict[str, object]:
            items = list(mapping.items())
            random.Random(1).shuffle(items)
            return dict(items)

        return replace(
            view,
            nodes=mixed(view.nodes),
            orders={n: tuple(reversed(o)) for n, o in mixed(view.orders).items()},
            progress=mixed(view.progress),
            outcomes=mixed(view.outcomes),
        )
