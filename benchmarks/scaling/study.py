"""Sweeps the study: steps of every model, algorithm, network and size, and the life of jobs whose nodes fail.

Pure but for the kept results that recovery.py reads. A seed repeats every number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

import numpy as np

from benchmarks.scaling.hardware import Spread
from benchmarks.scaling.life.events import FailureModel, node_events
from benchmarks.scaling.life.history import Account, History, JobShape, checkpoint_interval_s
from benchmarks.scaling.life.membership import Membership
from benchmarks.scaling.life.recovery import (
    Assumptions,
    join_pause_s,
    measured,
    pause_s,
)
from benchmarks.scaling.presets import CASES, LINKS, NODES, TCP_BYTES_PER_S, Case, Link
from benchmarks.scaling.steps.step import ALGORITHMS, WITHOUT_VOTE, simulate
from benchmarks.scaling.steps.timeline import vote_s

DAY_S = 86400.0
FAILURES = {"month": 30 * DAY_S, "week": 7 * DAY_S, "day": DAY_S}
"""Mean time between two failures of one node."""
REPAIR_S = 900.0  # a node is restarted, or another is found: assumed
SILENT_SHARE = 0.2  # assumed
_FAILURES_OF_A_RUN = 100
GOODPUT_NODES = (8, 64, 256, 1024)
GOODPUT_LINKS = tuple(link for link in LINKS if link.tcp)
# What is divided over the workers of a node needs an exchange of gradients or of what a round changed.
SHARDED = ("ddp", "gradient_allreduce", "bytegrad", "local_sgd", "streaming_diloco_int4")


@dataclass(frozen=True, slots=True)
class Point:
    """samples_per_s: of all workers. efficiency: over nodes times the throughput of one node. vote_s: in a step."""

    model: str
    link: str
    algorithm: str
    nodes: int
    step_s: float
    samples_per_s: float
    efficiency: float
    sent_bytes: float
    vote_s: float


def algorithms_of(case: Case) -> tuple[str, ...]:
    return SHARDED if case.sharded else tuple(ALGORITHMS)


def sweep(
    cases: Sequence[Case] = CASES,
    links: Sequence[Link] = LINKS,
    sizes: Sequence[int] = NODES,
    seed: int = 0,
    spread: Spread | None = None,
) -> list[Point]:
    found = []
    for case in cases:
        for link in links:
            for algorithm in algorithms_of(case):
                alone = simulate(case.cluster(1, link), case.load, algorithm, seed).step_s
                for nodes in sizes:
                    cluster = case.cluster(nodes, link, spread)
                    steps = simulate(cluster, case.load, algorithm, seed)
                    found.append(
                        Point(
                            case.name,
                            link.name,
                            algorithm,
                            nodes,
                            steps.step_s,
                            cluster.workers * case.batch / steps.step_s,
                            alone / steps.step_s,
                            steps.sent_bytes,
                            0.0 if algorithm in WITHOUT_VOTE else vote_s(cluster),
                        )
                    )
    return found


@dataclass(frozen=True, slots=True)
class Life:
    """A system's account of the same failures. rate: key of FAILURES, of a node."""

    model: str
    link: str
    system: str
    nodes: int
    rate: str
    silent_share: float
    account: Account
    loss_pause_s: float
    join_pause_s: float
    interval_s: float


StepTimes = Mapping[tuple[str, str, int], float]
"""Of gradient_allreduce, which all three systems have: seconds by model, link and nodes."""


def step_times(points: Sequence[Point]) -> StepTimes:
    """Of a sweep, so that lives and costs with the same seed need not simulate these steps again."""
    return {(p.model, p.link, p.nodes): p.step_s for p in points if p.algorithm == "gradient_allreduce"}


def shape_of(
    case: Case, link: Link, nodes: int, seed: int = 0, known: StepTimes = MappingProxyType({})
) -> JobShape:
    step_s = known.get((case.name, link.name, nodes))
    if step_s is None:
        step_s = simulate(case.cluster(nodes, link), case.load, "gradient_allreduce", seed).step_s
    rate = link.gbit * 1e9 / 8
    return JobShape(
        nodes,
        step_s,
        min(case.load.compute_s, step_s),
        case.state_bytes / (min(rate, TCP_BYTES_PER_S) if link.tcp else rate),
    )


def lives(
    cases: Sequence[Case] = CASES,
    links: Sequence[Link] = GOODPUT_LINKS,
    sizes: Sequence[int] = GOODPUT_NODES,
    silent_shares: Sequence[float] = (0.0, SILENT_SHARE),
    seed: int = 0,
    failures: int = _FAILURES_OF_A_RUN,
    known: StepTimes = MappingProxyType({}),
) -> list[Life]:
    """Every model, network and system under the same events; so long that about `failures` nodes fail."""
    assumed = Assumptions()
    recoveries = measured(assumed)
    found = []
    accompanied: set[tuple[int, str]] = set()
    for case, link, nodes in product(cases, links, sizes):
        shape = shape_of(case, link, nodes, seed, known)
        for (rate, mean_s), silent_share in product(FAILURES.items(), silent_shares):
            model = FailureModel(mean_s, REPAIR_S, silent_share)
            until_s = failures * mean_s / nodes
            events = node_events(nodes, model, until_s, np.random.default_rng([seed, nodes]))
            for system, recovery in recoveries.items():
                # each failure brings a repair, at which a system that restarts goes back too
                best_s = checkpoint_interval_s(assumed.checkpoint_s, mean_s / nodes / 2)
                interval_s = best_s if recovery.restarts_all else assumed.regular_checkpoint_s
                membership = None
                if system == "bagua" and (nodes, rate) not in accompanied:
                    # once for the same losses: no model, network or silence changes a member
                    accompanied.add((nodes, rate))
                    membership = Membership(nodes)
                history = History(shape, recovery, assumed, interval_s, membership)
                found.append(
                    Life(
                        case.name,
                        link.name,
                        system,
                        nodes,
                        rate,
                        silent_share,
                        history.run(events, until_s),
                        pause_s(recovery, nodes, False, shape.copy_s, assumed),
                        join_pause_s(recovery, nodes, shape.copy_s, shape.step_s, assumed),
                        interval_s,
                    )
                )
    return found


@dataclass(frozen=True, slots=True)
class MembershipCost:
    """What all others pause for when a node of one system is lost, and when one joins. copy_s: of the state."""

    model: str
    link: str
    nodes: int
    system: str
    copy_s: float
    loss_s: float
    join_s: float


def membership_costs(
    cases: Sequence[Case] = CASES,
    links: Sequence[Link] = LINKS,
    sizes: Sequence[int] = (8, 1024),
    seed: int = 0,
    known: StepTimes = MappingProxyType({}),
) -> list[MembershipCost]:
    assumed = Assumptions()
    recoveries = measured(assumed)
    found = []
    for case in cases:
        for link in links:
            for nodes in sizes:
                shape = shape_of(case, link, nodes, seed, known)
                for system, recovery in recoveries.items():
                    loss_s = pause_s(recovery, nodes, False, shape.copy_s, assumed)
                    join_s = join_pause_s(recovery, nodes, shape.copy_s, shape.step_s, assumed)
                    found.append(
                        MembershipCost(case.name, link.name, nodes, system, shape.copy_s, loss_s, join_s)
                    )
    return found


def stragglers(
    case: Case, link: Link, nodes: int, factor: float, seed: int = 0
) -> list[tuple[str, float, float]]:
    """By algorithm: a step with one node that is `factor` times slower, and how much longer it is than without."""
    slow = Spread(sigma=0.02, slow_nodes=1, slow_factor=factor)
    found = []
    for algorithm in algorithms_of(case):
        usual, slower = (
            simulate(case.cluster(nodes, link, spread), case.load, algorithm, seed).step_s
            for spread in (None, slow)
        )
        found.append((algorithm, slower, slower / usual))
    return found


def vote_of_leaders(case: Case, link: Link, nodes: int, seed: int = 0) -> list[tuple[str, float, float]]:
    """By algorithm: a step with the vote as it is, over all workers, and with one of the nodes' first workers alone."""
    cluster = case.cluster(nodes, link)
    # a ring of nodes takes as long as one in which the others' part costs nothing
    leaders = replace(cluster, inner_vote_latency_s=0.0)
    return [
        (algorithm, *(simulate(c, case.load, algorithm, seed).step_s for c in (cluster, leaders)))
        for algorithm in algorithms_of(case)
        if algorithm not in WITHOUT_VOTE
    ]
