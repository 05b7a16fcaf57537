"""A thousand nodes and two hundred jobs are planned in about a second at most, whatever they ask for.

The bound is in rounds of a plain loop, so that it means the same on a slow machine and under a tracer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster_pictures import NOW_S, POLICY

from bagua_agent.cluster.cluster_view import (
    ClusterView,
    JobProgress,
    NodeView,
    SubmissionView,
    UnitState,
    UnitView,
)
from bagua_agent.cluster.scheduling import plan

NODES, JOBS = 1000, 200
MOST_ROUNDS = 30_000_000  # in a second: a Xeon of 2023 with Python 3.11
SLOTS = (1, 2, 4, 8, 0)

KINDS: dict[str, Callable[[int], SubmissionView]] = {
    "small jobs share nodes": lambda i: SubmissionView(f"j{i}", 1, 4, SLOTS[i % 3], i % 2),
    "all want to grow": lambda i: SubmissionView(f"j{i}", 4, NODES, SLOTS[i % 5], i % 2),
    "most of them wait": lambda i: SubmissionView(f"j{i}", NODES // 5, NODES // 2),
    "labels": lambda i: SubmissionView(f"j{i}", 2, 20, SLOTS[i % 5], labels={"zone": "abcd"[i % 4]}),
    "none can run": lambda i: SubmissionView(f"j{i}", 2 * NODES, 2 * NODES, i % 7),
}


def round_s() -> float:
    """Processor time of one round of a loop that looks into a dictionary and adds."""
    rounds, table, found = 500_000, {i: i for i in range(64)}, 0
    began_s = time.process_time()
    for i in range(rounds):
        found += table[i & 63]
    return (time.process_time() - began_s) / rounds


def carried_out(view: ClusterView) -> ClusterView:
    """The plan's orders are followed, and every job works on all its nodes."""
    orders = {**view.orders, **plan(view, NOW_S, POLICY).orders}
    nodes, arrived = {}, {s.job_id: set[str]() for s in view.submissions}
    for name, node in view.nodes.items():
        units, first = [], 0
        for order in orders.get(name, ()):
            slots = tuple(range(first, first + order.slots))
            units.append(UnitView(order.job_id, UnitState.RUNNING, slots, order=order.number))
            arrived[order.job_id].add(name)
            first += order.slots
        nodes[name] = replace(node, units=tuple(units))
    progress = {j: JobProgress(bool(names), frozenset(names)) for j, names in arrived.items()}
    return replace(view, nodes=nodes, orders=orders, progress=progress)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_cluster_is_planned_in_about_a_second(kind: str) -> None:
    nodes = {
        f"n{i:04d}": NodeView(f"n{i:04d}", 8, {"zone": "abcd"[i % 4], "host": f"n{i:04d}"})
        for i in range(NODES)
    }
    empty = ClusterView(nodes, tuple(KINDS[kind](i) for i in range(JOBS)))
    full = carried_out(empty)
    large = tuple(SubmissionView(f"large{i}", 100, 100, priority=5) for i in range(5))
    more = replace(full, submissions=full.submissions + large)
    lost = {n: replace(node, present=False) for n, node in list(full.nodes.items())[:300]}
    worse = replace(full, nodes={**full.nodes, **lost})
    for what, view in (("empty", empty), ("full", full), ("large ones come", more), ("many are lost", worse)):
        began_s = time.process_time()  # of this process alone: other work on the machine does not count
        plan(view, NOW_S, POLICY)
        took_s = time.process_time() - began_s
        rounds = took_s / round_s()
        print(f"{kind}, {what}: {took_s:.3f} s, {rounds:.0f} rounds")
        assert rounds < MOST_ROUNDS, what
