"""Simulates the writes of many nodes' daemons and job agents in one process.

Each node decides with its daemon's own code (cluster/unit_plan.py); a unit begins and ends at once, and its agent's
keys are written as an agent would. One watch serves all nodes; what each node's own watches would bring it is counted.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import PROTOCOL, read_orders, write_unit
from bagua_agent.cluster.cluster_view import OrderView
from bagua_agent.cluster.unit_plan import OwnUnit, UnitSituation, Wish, plan_units
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Put, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change, PrefixMirror
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2
from bagua_contract.records import PROTOCOL_VERSION

SLOTS = 8
DEADLINE_S = 30.0
QUIET_S = 0.5  # without a change anywhere: nothing more follows from what was done
_WRITERS = 8


class NoDecision(Exception):
    """Nothing followed from a change within DEADLINE_S."""


def submission(job_id: str, least: int, most: int) -> pb.Submission:
    return pb.Submission(
        protocol=PROTOCOL, job_id=job_id, wanted=pb.Submission.RUN, min_nodes=least, max_nodes=most
    )


@dataclass(slots=True)
class _Node:
    name: str
    orders: tuple[OrderView, ...] = ()
    units: dict[str, OwnUnit] = field(default_factory=dict)
    told: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Messages:
    """Means over the nodes, from the first registration to the end. heard: events that a daemon's own watches bring."""

    nodes: int
    changes: int
    ordered: float
    most_ordered: int
    told: float
    most_told: int
    heard: float

    def in_words(self) -> str:
        return (
            f"Messages of a node in all {self.changes} changes (submissions, scales, drains, ends): orders written for "
            f"it {self.ordered:.1f} (at most {self.most_ordered}), its own record {self.told:.1f} (at most "
            f"{self.most_told}). Its watches bring it {self.heard:.0f} events, {self.heard / self.changes:.2f} a "
            "change: submissions and outcomes go to every daemon, orders to one."
        )


class SimulatedNodes:
    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self._store = store
        self._policy = ClusterPolicy()
        self._nodes = {name: _Node(name) for name in names}
        self._jobs: set[str] = set()
        self._over: set[str] = set()
        self._begun: set[str] = set()
        self._wake = threading.Condition()
        self._ordered_at: list[tuple[int, float]] = []  # revision, when it was heard
        self._where: dict[str, set[str]] = {}  # nodes with orders for a job
        self._gang_s: dict[str, dict[int, float]] = {}  # job -> nodes ordered -> when that many stood first
        self._heard_s = time.monotonic()
        self._pending = 0
        self._orders_written: Counter[str] = Counter()
        self._records_written: Counter[str] = Counter()
        self._broadcasts = 0
        self._submission_revisions: dict[str, int] = {}
        self._drained: set[str] = set()
        self._errors: list[BaseException] = []
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="simulated-node")
        self._mirror = PrefixMirror(store, cluster_keys.PREFIX, self._changed)

    # -- what the benchmark does

    def register(self) -> None:
        self._mirror.start()
        for node in self._nodes.values():
            self._later(self._follow, node)

    def stop(self) -> None:
        self._mirror.stop()
        self._writers.shutdown()
        if self._errors:
            raise self._errors[0]

    def one_of(self, job_id: str) -> str:
        with self._wake:
            return min(self._where[job_id] - self._drained)

    def drain(self, name: str) -> int:
        self._drained.add(name)
        cluster_requests.drain(self._store, name, force=False, reason="")
        found = self._store.get(cluster_keys.drain(name))
        assert found is not None
        return found.mod_revision

    def end(self, job_id: str) -> int:
        """The job's leader says that it succeeded, and its agents end."""
        with self._wake:
            self._over.add(job_id)
            where = sorted(self._where[job_id])
        result = membership_pb2.Result(outcome=membership_pb2.Result.SUCCEEDED)
        revision = self._store.put(JobKeys(job_id).result, result.SerializeToString())
        for name in where:
            node = self._nodes[name]
            with node.lock:
                unit = node.units.get(job_id)
                if unit is not None:
                    node.units[job_id] = replace(unit, alive=False, ended_s=time.monotonic())
            self._later(self._follow, node)
        return revision

    def revision_of_submission(self, job_id: str) -> int:
        found = self._store.get(cluster_keys.submission(job_id))
        assert found is not None
        return found.mod_revision

    # -- what it waits for

    def await_orders_after(self, revision: int) -> float:
        """The time at which the first order of a later revision arrived."""

        def found() -> float | None:
            return next((at_s for ordered, at_s in self._ordered_at if ordered > revision), None)

        return self._await(found, f"an order after revision {revision}")

    def await_gang(self, job_id: str, least: int) -> float:
        def found() -> float | None:
            times = self._gang_s.get(job_id, {})
            return min((at_s for count, at_s in times.items() if count >= least), default=None)

        return self._await(found, f"orders for {least} nodes of {job_id}")

    def await_settled(self) -> None:
        """Until nothing was written for a while, and nothing is left to write."""

        def found() -> float | None:
            quiet = not self._pending and time.monotonic() - self._heard_s >= QUIET_S
            return self._heard_s if quiet and len(self._records_written) == len(self._nodes) else None

        self._await(found, "a quiet cluster", poll_s=0.02)

    def _await(self, found: Callable[[], float | None], what: str, poll_s: float = 1.0) -> float:
        deadline_s = time.monotonic() + DEADLINE_S
        with self._wake:
            while True:
                if self._errors:
                    raise self._errors[0]
                at_s = found()
                if at_s is not None:
                    return at_s
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise NoDecision(f"no {what} within {DEADLINE_S:g} s")
                self._wake.wait(min(poll_s, left_s))

    def messages(self) -> Messages:
        def of(counter: Counter[str]) -> list[int]:
            return [counter[name] for name in self._nodes]

        ordered, told = of(self._orders_written), of(self._records_written)
        changes = len(self._submission_revisions) + len(self._drained) + len(self._over)
        return Messages(
            len(self._nodes),
            changes,
            statistics.fmean(ordered),
            max(ordered),
            statistics.fmean(told),
            max(told),
            self._broadcasts + statistics.fmean(ordered),
        )

    # -- what the store says, in the mirror's thread

    def _changed(self, changes: tuple[Change, ...]) -> None:
        now_s = time.monotonic()
        with self._wake:
            self._heard_s = now_s
            for change in changes:
                self._take(change, now_s)
            self._wake.notify_all()

    def _take(self, change: Change, now_s: float) -> None:
        name = cluster_keys.id_in(cluster_keys.ORDERS, change.key)
        if name is not None:
            node = self._nodes[name]
            node.orders = read_orders(change.value) if change.value is not None else ()
            self._orders_written[name] += 1
            self._ordered_at.append((change.mod_revision, now_s))
            wanted = {order.job_id for order in node.orders}
            for job_id in wanted | {j for j, where in self._where.items() if name in where}:
                where = self._where.setdefault(job_id, set())
                (where.add if job_id in wanted else where.discard)(name)
                self._gang_s.setdefault(job_id, {}).setdefault(len(where), now_s)
            self._later(self._follow, node)
            return
        for folder in (cluster_keys.SUBMISSIONS, cluster_keys.OUTCOMES):
            job_id = cluster_keys.id_in(folder, change.key)
            if job_id is not None:
                self._broadcasts += 1
                if folder == cluster_keys.SUBMISSIONS:
                    self._jobs.add(job_id)
                    self._submission_revisions[f"{job_id}@{change.mod_revision}"] = change.mod_revision
                else:
                    self._over.add(job_id)

    # -- what a node does, in the writers' threads

    def _later(self, act: Callable[[_Node], None], node: _Node) -> None:
        with self._wake:
            self._pending += 1

        def run() -> None:
            try:
                act(node)
            except Exception as error:  # noqa: BLE001  the benchmark's own thread raises it
                self._errors.append(error)
            finally:
                with self._wake:
                    self._pending -= 1
                    self._wake.notify_all()

        self._writers.submit(run)

    def _follow(self, node: _Node) -> None:
        """Decide as its daemon would, do it at once, tell."""
        with node.lock:
            wishes = {job_id: Wish.OVER if job_id in self._over else Wish.RUN for job_id in tuple(self._jobs)}
            now_s = time.monotonic()
            situation = UnitSituation(SLOTS, node.orders, tuple(node.units.values()), wishes)
            made = plan_units(situation, now_s, self._policy)
            for job_id in made.forgets:
                del node.units[job_id]
            for start in made.starts:
                node.units[start.job_id] = OwnUnit(start.job_id, True, slots=start.slots, order=start.order)
                self._agent_begins(node.name, start.job_id, len(start.slots))
            for ask in made.asks:
                self._agent_ends(node.name, ask.job_id)
                node.units[ask.job_id] = replace(node.units[ask.job_id], alive=False, ended_s=now_s)
            situation = replace(situation, units=tuple(node.units.values()))
            report = plan_units(situation, now_s, self._policy).report
            record = pb.Node(
                protocol=PROTOCOL, node_name=node.name, slots=SLOTS, units=[write_unit(u) for u in report]
            )
            value = record.SerializeToString(deterministic=True)
            if value != node.told:
                node.told = value
                self._store.put(cluster_keys.node(node.name), value)
                self._records_written[node.name] += 1

    def _agent_begins(self, name: str, job_id: str, slots: int) -> None:
        keys = JobKeys(job_id)
        agent_id = f"{name}-agent"
        agent = membership_pb2.Agent(
            protocol=PROTOCOL_VERSION, agent_id=agent_id, node_name=name, slots=slots
        )
        writes = [Put(keys.agent(agent_id), agent.SerializeToString())]
        writes += [Put(keys.member(f"{agent_id}.{slot}.0"), b"") for slot in range(slots)]
        with self._wake:
            if job_id not in self._begun:
                self._begun.add(job_id)
                generation = membership_pb2.Generation(protocol=PROTOCOL_VERSION, number=1)
                writes.append(Put(keys.generation, generation.SerializeToString()))
        self._store.transact([], writes)

    def _agent_ends(self, name: str, job_id: str) -> None:
        keys = JobKeys(job_id)
        agent_id = f"{name}-agent"
        gone = [keys.agent(agent_id), *(keys.member(f"{agent_id}.{slot}.0") for slot in range(SLOTS))]
        self._store.transact([], deletes=gone)
