"""A cluster as it truly is, beside what its scheduler learns of it: nodes, daemons with their units, a store, people.

Daemons decide by unit_plan, the scheduler by scheduling. After each plan the rules of cluster_rules.py are checked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster_rules import POLICY, CheckedCluster

from bagua_agent.base.sizes import SizePolicy
from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.cluster_view import (
    ClusterView,
    DrainView,
    JobEnd,
    JobProgress,
    NodeView,
    OrderView,
    OutcomeView,
    SubmissionView,
    UnitView,
)
from bagua_agent.cluster.node_trouble import failures_after
from bagua_agent.cluster.retention import UnusedOrders
from bagua_agent.cluster.scheduling import plan
from bagua_agent.cluster.unit_plan import OwnUnit, UnitSituation, Wish, plan_units

TICK_S = 1.0
SHUTDOWN_S = 4.0
DIES_HARD_S = 3.0


@dataclass
class SimulatedUnit:
    own: OwnUnit
    started_s: float
    arrives_s: float
    leaves_s: float | None = None
    ignores_asking: bool = False


@dataclass
class SimulatedNode:
    """powered: the host runs. connected: its daemon runs and reaches the store."""

    name: str
    slots: int
    labels: Mapping[str, str]
    powered: bool = True
    connected: bool = True
    troubles: tuple[str, ...] = ()
    units: dict[str, SimulatedUnit] = field(default_factory=dict)
    remembered: tuple[OrderView, ...] | None = None
    report: tuple[UnitView, ...] = ()
    missed_since_s: float | None = None


class SimulatedCluster(CheckedCluster):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.nodes: dict[str, SimulatedNode] = {}
        self.orders: dict[str, tuple[OrderView, ...]] = {}
        self.broken_pairs: set[tuple[str, str]] = set()
        self.since_s = self.now_s
        self.lost_keys: list[tuple[float, str, object]] = []
        self.states: dict[str, JobState] = {}
        self.reasons: set[str] = set()
        self.unused_orders = UnusedOrders(POLICY)
        self.count = 0
        # of jobs whose replicas have workers on two nodes each: those that train
        self.replicas: dict[str, list[frozenset[str]]] = {}

    # -- what is true
    def living(self, node: SimulatedNode) -> list[SimulatedUnit]:
        return [u for u in node.units.values() if u.own.alive] if node.powered else []

    def arrived(self, job_id: str) -> frozenset[str]:
        return frozenset().union(*self.replicas[job_id]) if job_id in self.replicas else self.ready(job_id)

    def ready(self, job_id: str) -> frozenset[str]:
        """Nodes whose workers could train."""
        return frozenset(
            n.name
            for n in self.nodes.values()
            for u in self.living(n)
            if u.own.job_id == job_id and u.arrives_s <= self.now_s
        )

    def view(self) -> ClusterView:
        nodes = {}
        for n in self.nodes.values():
            present = n.powered and n.connected
            nodes[n.name] = NodeView(
                n.name,
                n.slots,
                n.labels,
                n.troubles,
                n.report,
                self.drains.get(n.name),
                present,
                0.0 if n.missed_since_s is None else max(n.missed_since_s, self.since_s),
            )
        progress = {
            j: JobProgress(
                j in self.begun, self.arrived(j), self.results.get(j), tuple(self.replicas.get(j, ()))
            )
            for j in self.submissions
        }
        return ClusterView(
            nodes,
            tuple(self.submissions.values()),
            dict(self.orders),
            progress,
            dict(self.outcomes),
            self.since_s,
        )

    # -- time
    def tick(self) -> None:
        self.now_s += TICK_S
        for at_s, kind, value in list(self.lost_keys):
            if at_s <= self.now_s:
                self.lost_keys.remove((at_s, kind, value))
                self.put_back(kind, value)
        for node in self.nodes.values():
            self.live(node)
            present = node.powered and node.connected
            if present:
                self.come_back(node)
                self.run_daemon(node)
            elif node.missed_since_s is None:
                node.missed_since_s = self.now_s
        for job_id in self.replicas:
            self.form_replicas(job_id)
        for job_id, job in self.submissions.items():
            if job_id not in self.begun and len(self.arrived(job_id)) >= self.least(job):
                self.begun.add(job_id)
        self.schedule()

    def come_back(self, node: SimulatedNode) -> None:
        """A daemon that was away for long forgets orders that are gone, and does not put them back."""
        missed_s = 0.0 if node.missed_since_s is None else self.now_s - node.missed_since_s
        is_stale = missed_s > POLICY.put_back_within_s and node.name not in self.orders
        if is_stale and node.remembered is not None:
            node.remembered = None
            self.seen["forgot its orders"] += 1
        node.missed_since_s = None

    def form_replicas(self, job_id: str) -> None:
        """A replica ends with one of its nodes; the other starts its workers again, and pairs with any."""
        ready, whole = self.ready(job_id), []
        for replica in self.replicas[job_id]:
            if replica <= ready:
                whole.append(replica)
                continue
            for name in replica & ready:
                self.nodes[name].units[job_id].arrives_s = self.now_s + 2.0
            self.seen["a replica ended"] += 1
        self.replicas[job_id] = whole
        alone = sorted(self.ready(job_id) - self.arrived(job_id))
        whole += [frozenset(pair) for pair in zip(alone[::2], alone[1::2], strict=False)]

    def live(self, node: SimulatedNode) -> None:
        """Units leave when asked, and end with their job."""
        for unit in self.living(node):
            if unit.own.job_id in self.results and unit.leaves_s is None:
                unit.leaves_s = self.now_s + self.random.choice((0.0, 1.0, 5.0))
            if unit.leaves_s is not None and unit.leaves_s <= self.now_s:
                self.end_unit(unit, 0)

    def end_unit(self, unit: SimulatedUnit, exit_code: int, why: str = "") -> None:
        own = unit.own
        asked = own.asked_since_s is not None or own.job_id in self.results
        failures = failures_after(own.failures, self.now_s - unit.started_s, asked, POLICY)
        unit.own = replace(
            own, alive=False, slots=(), ended_s=self.now_s, exit_code=exit_code, failures=failures, reason=why
        )

    def run_daemon(self, node: SimulatedNode) -> None:
        if node.name in self.orders:
            node.remembered = self.orders[node.name]
        elif node.remembered is not None and not any(v == node.name for _, _, v in self.lost_keys):
            self.orders[node.name] = node.remembered
        wishes = {}
        for job_id in {u for u in node.units} | {o.job_id for o in node.remembered or ()}:
            if job_id in self.outcomes:
                wishes[job_id] = Wish.OVER
            elif job_id in self.submissions:
                wishes[job_id] = Wish.STOP if self.submissions[job_id].stop else Wish.RUN
        situation = UnitSituation(
            node.slots, node.remembered, tuple(u.own for u in node.units.values()), wishes
        )
        todo = plan_units(situation, self.now_s, POLICY)
        ordered = {o.job_id for o in node.remembered or ()}
        for start in todo.starts:
            taken = {s for u in self.living(node) for s in u.own.slots}
            assert not taken & set(start.slots) and set(start.slots) <= set(range(node.slots)), (
                "a slot of two jobs"
            )
            assert wishes[start.job_id] is Wish.RUN and start.job_id in ordered
            before = node.units.get(start.job_id)
            own = OwnUnit(start.job_id, True, start.slots, start.order, SHUTDOWN_S)
            if before is not None:
                assert not before.own.alive
                own = replace(own, failures=before.own.failures)
                self.seen["started again"] += 1
            unit = SimulatedUnit(own, self.now_s, self.now_s + self.random.choice((0, 1, 2, 4)))
            unit.ignores_asking = self.random.random() < 0.15
            node.units[start.job_id] = unit
            if (start.job_id, node.name) in self.broken_pairs:
                self.end_unit(unit, 1, "broken here")
        for ask in todo.asks:
            unit = node.units[ask.job_id]
            stops = wishes.get(ask.job_id) is Wish.STOP
            assert stops or (node.remembered is not None and ask.job_id not in ordered), (
                "absence ended a unit"
            )
            assert unit.own.alive and unit.own.asked_since_s is None
            unit.own = replace(unit.own, asked_since_s=self.now_s)
            if not unit.ignores_asking:
                unit.leaves_s = self.now_s + self.random.choice((0.0, 1.0, 3.0))
            self.seen["asked"] += 1
        for kill in todo.kills:
            unit = node.units[kill.job_id]
            assert unit.own.asked_since_s is not None
            assert self.now_s >= unit.own.asked_since_s + SHUTDOWN_S + POLICY.kill_grace_s
            unit.own = replace(unit.own, killed_since_s=self.now_s)
            unit.leaves_s = self.now_s + DIES_HARD_S
            self.seen["killed"] += 1
        for job_id in todo.forgets:
            assert not node.units.pop(job_id).own.alive
        node.report = todo.report
        alive = {u.own.job_id for u in self.living(node)}
        assert alive - {s.job_id for s in todo.starts} <= {u.job_id for u in todo.report if u.alive}

    # -- the scheduler
    def schedule(self) -> None:
        view = self.view()
        todo = plan(view, self.now_s, POLICY)
        self.check(view, todo)
        for job_id, end in todo.outcomes.items():
            self.outcomes[job_id] = end
        writes = list(todo.orders.items())
        if self.random.random() < (0.15 if writes else 0.005):
            # it is gone in the middle of its writes
            self.random.shuffle(writes)
            del writes[self.random.randrange(len(writes) + 1) :]
            self.since_s = self.now_s
            self.seen["replaced while writing"] += bool(todo.orders) and len(writes) < len(todo.orders)
        self.orders.update(writes)
        self.remove_unused_orders()
        self.states = {j: p.state for j, p in todo.jobs.items()}
        for job_id, state in self.states.items():
            self.seen[state.value] += 1
            assert todo.jobs[job_id].reason
            self.seen["given back to a size"] += (
                "is given back: its allowed sizes" in todo.jobs[job_id].reason
            )
            self.reasons.add(todo.jobs[job_id].reason)

    def remove_unused_orders(self) -> None:
        gone = [n for n, node in self.nodes.items() if not (node.powered and node.connected)]
        unused = [(n, 0) for n in gone if self.orders.get(n) == ()]
        for name, _ in self.unused_orders.expired(unused, self.now_s):
            del self.orders[name]
            self.seen["empty orders removed"] += 1

    # -- what people and fate do
    def add_node(self) -> None:
        name = f"n{len(self.nodes):02d}"
        labels = {"kind": self.random.choice(("a", "b"))}
        self.nodes[name] = SimulatedNode(name, self.random.choice((1, 2, 4, 8)), labels)

    def submit(self) -> str:
        self.count += 1
        least = self.random.choice((1, 1, 2, 3, 5))
        most = least + self.random.choice((0, 0, 1, 4))
        policy = SizePolicy()
        if most > least and self.random.random() < 0.7:
            inside = range(least + 1, most)
            sizes = (least, *sorted(self.random.sample(inside, len(inside) // 2)), most)
            policy = SizePolicy(sizes, self.random.choice((0, 0, *sizes)))
        job = SubmissionView(
            f"j{self.count}",
            least,
            most,
            self.random.choice((0, 1, 1, 2, 4, 9)),
            self.random.choice((0, 0, 0, 1, -1)),
            self.random.choice(({}, {}, {"kind": "a"})),
            size_policy=policy,
        )
        self.submissions[job.job_id] = job
        return job.job_id

    def submit_replicas(self, least: int, most: int) -> str:
        """A job whose replicas have workers on two nodes each, with one slot a node."""
        self.count += 1
        job = SubmissionView(
            f"j{self.count}", least, most, 1, size_policy=SizePolicy(tuple(range(least, most + 1, 2)))
        )
        self.submissions[job.job_id], self.replicas[job.job_id] = job, []
        return job.job_id

    def end_job(self, job_id: str) -> None:
        how = self.random.choice((JobEnd.SUCCEEDED, JobEnd.FAILED))
        self.results[job_id] = OutcomeView(how, 0, "by itself", self.now_s)

    def power(self, node: SimulatedNode, on: bool) -> None:
        if not on:
            node.units.clear()
            node.remembered = None
        node.powered = on

    def wipe(self) -> None:
        """The store loses its keys; what nodes and the scheduler's node remember comes back within two seconds."""
        self.since_s = self.now_s
        at_s = lambda: self.now_s + self.random.choice((0.0, 1.0, 2.0))  # noqa: E731
        for job in self.submissions.values():
            self.lost_keys.append((at_s(), "submission", job))
        for job_id, end in self.outcomes.items():
            self.lost_keys.append((at_s(), "outcome", (job_id, end)))
        for name, node in self.nodes.items():
            if self.random.random() < 0.3:
                node.remembered = None  # its daemon was started again meanwhile
            else:
                self.lost_keys.append((at_s(), "orders", name))
        self.submissions, self.outcomes, self.orders = {}, {}, {}

    def put_back(self, kind: str, value: object) -> None:
        if isinstance(value, SubmissionView):
            self.submissions[value.job_id] = value
        elif kind == "outcome":
            assert isinstance(value, tuple)
            self.outcomes[value[0]] = value[1]

    def happen(self) -> None:
        draw = self.random.random
        going = [j for j in self.begun if j in self.submissions and j not in self.results]
        nodes = list(self.nodes.values())
        node = self.random.choice(nodes)
        if draw() < 0.15 and sum(s in (JobState.QUEUED,) for s in self.states.values()) < 6:
            self.submit()
        if draw() < 0.05 and going:
            self.end_job(self.random.choice(sorted(going)))
        if draw() < 0.02 and self.submissions:
            job_id = self.random.choice(sorted(self.submissions))
            self.submissions[job_id] = replace(self.submissions[job_id], stop=True)
        if draw() < 0.04 and self.submissions:
            job = self.submissions[self.random.choice(sorted(self.submissions))]
            least = self.random.choice((1, 2, 4))
            most = least + self.random.choice((0, 2))
            if sizes := job.size_policy.sizes:
                least, most = sorted((self.random.choice(sizes), self.random.choice(sizes)))
            self.submissions[job.job_id] = replace(job, min_nodes=least, max_nodes=most)
        # broken less often than mended, so that most of the cluster works most of the time
        if draw() < (0.02 if node.powered else 0.3):
            self.power(node, not node.powered)
        if draw() < (0.02 if node.connected else 0.2):
            node.connected = not node.connected
        if draw() < (0.15 if node.name in self.drains else 0.03):
            if node.name in self.drains:
                del self.drains[node.name]
            else:
                self.drains[node.name] = DrainView(draw() < 0.3, "test")
        if draw() < (0.15 if node.troubles else 0.03):
            node.troubles = () if node.troubles else ("no GPU",)
        if draw() < 0.08 and (units := self.living(node)):
            self.end_unit(self.random.choice(units), 137, "killed")
        if draw() < 0.02 and self.submissions:
            self.broken_pairs.add((self.random.choice(sorted(self.submissions)), node.name))
        if draw() < 0.01:
            self.since_s = self.now_s
        if draw() < 0.01:
            self.wipe()

    def calm_down(self) -> None:
        """Everything is repaired, and there are no new requests."""
        self.drains.clear()
        self.broken_pairs.clear()
        for node in self.nodes.values():
            self.power(node, True) if not node.powered else None
            node.connected, node.troubles = True, ()
