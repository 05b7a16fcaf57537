"""Draws a sequence of joins, leaves and kills from a seed, and performs it on a job.

The drawing is pure: a seed gives the same sequence everywhere. Each kind comes at least once in a sequence of
LEAST_FAULTS. A fault leaves at least one worker untouched, which holds the job's state.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.faults.job import Job

LEAST_FAULTS = 6
FIRST_WORKERS = 2  # of node 0, with which the job begins
MOST_NODES, MOST_WORKERS = 3, 4
NODES = f"1:{MOST_NODES}"  # the job's --nnodes


class Kind(Enum):
    """The value is what tables show."""

    JOIN = "joins"
    LEAVE = "leaves"
    WORKER_KILLED = "loses a worker, which is replaced"
    NODE_KILLED = "is killed"


@dataclass(frozen=True, slots=True)
class Fault:
    """node: by the order of starts. slot: of the killed worker. world: of the workers when the fault is over."""

    kind: Kind
    node: int
    world: int
    slot: int = 0

    def __str__(self) -> str:
        return f"node {self.node} {self.kind.value} ({self.world})"


def draw(seed: int, count: int = LEAST_FAULTS) -> list[Fault]:
    """Returns `count` faults of a job that begins with one node of FIRST_WORKERS. Kinds that came least often so far
    have precedence."""
    chance, workers, started = random.Random(f"faults {seed}"), {0: FIRST_WORKERS}, 1
    faults, came = list[Fault](), Counter[Kind]()
    for _ in range(count):
        possible = list(_possible(workers))
        least = min(came[kind] for kind in possible)
        kind = chance.choice([k for k in possible if came[k] == least])
        came[kind] += 1
        node, slot = chance.choice(sorted(workers)), 0
        if kind is Kind.JOIN:
            node, started = started, started + 1
            workers[node] = chance.randint(1, min(2, MOST_WORKERS - sum(workers.values())))
        elif kind is Kind.WORKER_KILLED:
            slot = chance.randrange(workers[node])
        else:
            del workers[node]
        faults.append(Fault(kind, node, sum(workers.values()), slot))
    return faults


def _possible(workers: dict[int, int]) -> Iterator[Kind]:
    if len(workers) < MOST_NODES and sum(workers.values()) < MOST_WORKERS:
        yield Kind.JOIN
    if len(workers) > 1:
        yield from (Kind.LEAVE, Kind.NODE_KILLED)
    if sum(workers.values()) > 1:
        yield Kind.WORKER_KILLED


def perform(job: Job, faults: Sequence[Fault], deadline_s: float) -> None:
    """Runs the job to its end through these faults, and checks it. deadline_s: of each node's end."""
    nodes, world = {0: job.start(slots=FIRST_WORKERS)}, FIRST_WORKERS
    seen = job.await_world(world, after_step=job.await_step(5))
    killed = Counter[tuple[int, int]]()
    for fault in faults:
        if fault.kind is Kind.JOIN:
            nodes[fault.node] = job.start(slots=fault.world - world)
        elif fault.kind is Kind.LEAVE:
            nodes.pop(fault.node).send(signal.SIGINT)
        elif fault.kind is Kind.NODE_KILLED:
            nodes.pop(fault.node).kill_agent()
        else:
            node, slot = nodes[fault.node], fault.slot
            killed[fault.node, slot] += 1
            node.workers[slot].kill()
            node.await_line(f"worker in slot {slot} ended: killed by SIGKILL", times=killed[fault.node, slot])
            seen = job.await_world(world - 1, after_step=seen)
        world = fault.world
        seen = job.await_world(world, after_step=seen)
    job.hurry()
    for node in nodes.values():
        assert node.process.wait(deadline_s) == 0, node.log
    job.check(finished=world)


def in_words(seed: int, faults: Sequence[Fault]) -> str:
    """Names the seed, the faults, and the number of workers after each."""
    return f"seed {seed}: " + ", ".join(map(str, faults))
