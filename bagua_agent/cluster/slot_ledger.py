"""Records, while a plan is made, which slots are promised to which job, and which nodes a job can spare.

The only mutable object of these decisions; it lives for one pass. A slot is promised by an order, whether or not
another job's unit still has to leave it: the daemon starts a unit only when its slots are really free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bagua_agent.base.sizes import AllowedSizes
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView, NodeView, OrderView, SubmissionView, UnitState
from bagua_agent.cluster.node_trouble import is_lost, why_left_out
from bagua_agent.cluster.orders_in_force import in_force, why_leave

# jobs that differ in nothing of this could use the same nodes
Kind = tuple[frozenset[tuple[str, str]], int]


@dataclass(slots=True)
class Holding:
    """A job that is to run, with the nodes promised to it.

    place: among submissions. least: nodes without which it does not start, or does not continue. room: the numbers of
    nodes that it may have. kept: nodes that stay. left: nodes that it should leave, once it can, with why.
    arrived: nodes whose workers are in its generation, or ready to be. sure: those of them that are known to be well.
    replicas: by node, the nodes of each replica that has workers there and on other nodes.
    """

    job: SubmissionView
    place: int
    least: int
    room: AllowedSizes
    begun: bool
    arrived: frozenset[str]
    kept: dict[str, OrderView] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    sure: set[str] = field(default_factory=set)
    replicas: Mapping[str, Sequence[frozenset[str]]] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, int]:
        """The place of the job in the order of decisions, least first: higher priority, then the earlier submitted."""
        return (-self.job.priority, self.place)

    @property
    def lasting(self) -> Collection[str]:
        """The kept nodes that the training still has once it has left `left`: a node whose replicas all have another
        node there is not one of them, so a replacement for it is needed first."""
        if not self.left or not self.replicas:
            return self.kept
        return [n for n in self.kept if not self._ends_with_left(n)]

    def _ends_with_left(self, node_name: str) -> bool:
        held = [r for r in self.replicas.get(node_name, ()) if self.holds(r)]
        return bool(held) and all(any(n in self.left for n in r) for r in held)

    @property
    def lacking(self) -> int:
        """The number of nodes that the job lacks to its least number."""
        return max(0, self.least - len(self.lasting))

    @property
    def surplus(self) -> int:
        return max(0, len(self.lasting) - self.least)

    @property
    def beyond(self) -> int:
        """The number of nodes above the last allowed size; 0 where it has an allowed size, or lacks nodes."""
        count = len(self.lasting)
        return 0 if count < self.least else count - self.room.fit(count)

    @property
    def step(self) -> int:
        """The number of nodes to the next allowed size; 0: it has its most."""
        count = len(self.lasting)
        size = self.room.next_above(count)
        return 0 if size is None else size - count

    def replicas_on(self, node_name: str) -> Sequence[frozenset[str]]:
        """Returns the nodes of each replica that has workers there; the node alone where none has workers elsewhere
        too."""
        return self.replicas.get(node_name) or (frozenset((node_name,)),)

    def holds(self, nodes: Iterable[str]) -> bool:
        return all(n in self.kept or n in self.left for n in nodes)

    def works_on(self, node_name: str) -> bool:
        """Tells whether the training would notice that this node is gone: it does not where all its replicas have lost
        another node."""
        return self.begun and node_name in self.arrived and any(map(self.holds, self.replicas_on(node_name)))

    def may_lose(self, node_name: str) -> bool:
        """Tells whether the least number goes on without this node: the job is never taken below it (invariant 3)."""
        if not self.works_on(node_name):
            return True
        lost = {
            n
            for replica in self.replicas_on(node_name)
            for n in replica
            if not any(node_name not in r and self.holds(r) for r in self.replicas_on(n))
        }
        return len(self.sure) - len(self.sure & lost) >= self.least

    def may_give(self, node_name: str) -> bool:
        """Tells whether another job may have the node."""
        return node_name in self.kept and self.surplus > 0 and self.may_lose(node_name)


class Ledger:
    """The slots promised to each job during one pass. orders: node to job to order, as they will be. free: slots of a
    node that no order asks for."""

    def __init__(self, view: ClusterView, now_s: float, policy: ClusterPolicy, number: int) -> None:
        self.view, self.now_s, self.policy, self.number = view, now_s, policy, number
        # a name that has only an empty order is of a node that went long ago: nothing is known of it
        names = sorted(view.nodes.keys() | {n for n, orders in view.orders.items() if orders})
        self.nodes = {n: view.node(n) for n in names}
        self.orders = {n: {o.job_id: o for o in in_force(view, n)} for n in names}
        self.free = {
            n: self.nodes[n].slots - sum(o.slots for o in orders.values())
            for n, orders in self.orders.items()
        }
        self.holdings: dict[str, Holding] = {}
        # nodes that earlier jobs in the queue wait for
        self.claimed: dict[str, str] = {}
        self.nodes_of: dict[str, set[str]] = defaultdict(set)
        for name, orders in self.orders.items():
            for job_id in orders:
                self.nodes_of[job_id].add(name)
        self._alive = {
            n: {u.job_id: len(u.slots) for u in node.units if u.alive} for n, node in self.nodes.items()
        }
        self.left_out: dict[str, dict[str, str]] = defaultdict(dict)
        for name, node in self.nodes.items():
            for unit in node.units:
                why = why_left_out(unit, policy)
                if why:
                    self.left_out[unit.job_id][name] = why
        self._fit: dict[Kind, dict[str, str]] = {}

    # -- who holds what
    def give(self, holding: Holding, node_name: str) -> None:
        """Promises the node's slots to the job."""
        job_id, slots = holding.job.job_id, needed(holding.job, self.nodes[node_name])
        order = OrderView(job_id, slots, self.number, holding.job.nonce)
        self.orders[node_name][job_id] = holding.kept[node_name] = order
        self.free[node_name] -= slots
        self.nodes_of[job_id].add(node_name)
        self.note_sure(holding, node_name)

    def take(self, job_id: str, node_name: str) -> OrderView:
        order = self.orders[node_name].pop(job_id)
        self.free[node_name] += order.slots
        self.nodes_of[job_id].discard(node_name)
        holding = self.holdings.get(job_id)
        if holding is not None:
            holding.kept.pop(node_name, None)
            holding.left.pop(node_name, None)
            self.note_sure(holding, node_name)
        return order

    def put_back(self, node_name: str, order: OrderView) -> None:
        """Undoes the taking of an order that its job would have kept."""
        holding = self.holdings[order.job_id]
        self.orders[node_name][order.job_id] = holding.kept[node_name] = order
        self.free[node_name] -= order.slots
        self.nodes_of[order.job_id].add(node_name)
        self.note_sure(holding, node_name)

    def note_sure(self, holding: Holding, node_name: str) -> None:
        """Updates `sure` after the node has come or gone, and with it the replicas that have workers there."""
        for name in {n for replica in holding.replicas_on(node_name) for n in replica}:
            if self._is_sure(holding, name):
                holding.sure.add(name)
            else:
                holding.sure.discard(name)

    def _is_sure(self, holding: Holding, node_name: str) -> bool:
        return holding.works_on(node_name) and any(
            holding.holds(replica) and all(self._runs(holding.job.job_id, n) for n in replica)
            for replica in holding.replicas_on(node_name)
        )

    def _runs(self, job_id: str, node_name: str) -> bool:
        node = self.nodes[node_name]
        unit = node.unit(job_id) if node.present else None
        return unit is not None and unit.state is UnitState.RUNNING

    def leaving(self, node_name: str) -> Mapping[str, int]:
        """Returns the jobs whose units live on the node without an order, with the slots they still take."""
        orders = self.orders[node_name]
        return {job_id: slots for job_id, slots in self._alive[node_name].items() if job_id not in orders}

    def still_taken(self, node_name: str) -> int:
        alive = self._alive[node_name]
        return sum(self.leaving(node_name).values()) if alive else 0

    # -- who could be where
    def fitting(self, job: SubmissionView) -> list[str]:
        """Returns the nodes that this job could use if no other job were there."""
        out = self.left_out.get(job.job_id, {})
        return [n for n, why in self.why_unfit(job).items() if not why and n not in out]

    def fits(self, job: SubmissionView, node_name: str) -> bool:
        return not self.why_unfit(job)[node_name] and node_name not in self.left_out.get(job.job_id, {})

    def why_unfit(self, job: SubmissionView) -> Mapping[str, str]:
        """Returns, for every node, why no job of this kind can be on it; empty: it can."""
        kind = (frozenset(job.labels.items()), job.slots_per_node)
        if kind not in self._fit:
            self._fit[kind] = {n: self._why_unfit(job, node) for n, node in self.nodes.items()}
        return self._fit[kind]

    def _why_unfit(self, job: SubmissionView, node: NodeView) -> str:
        # first: what a node has that is gone explains nothing, and of one that was never heard of it is not known
        if is_lost(node, self.now_s, self.policy):
            return f"{node.node_name} is lost"
        if node.node_name not in self.view.nodes:
            return f"{node.node_name} is not heard of"
        if not has_labels(job, node):
            return f"{node.node_name} has other labels"
        if not 0 < needed(job, node) <= node.slots:
            return f"{node.node_name} has only {node.slots} slots"
        return why_leave(node)


def has_labels(job: SubmissionView, node: NodeView) -> bool:
    return not job.labels or all(node.labels.get(key) == value for key, value in job.labels.items())


def needed(job: SubmissionView, node: NodeView) -> int:
    """Returns the number of slots that the job asks of this node."""
    return job.slots_per_node or node.slots
