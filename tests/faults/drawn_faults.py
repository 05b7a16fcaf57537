"""Draws a sequence of joins, leaves and faults from a seed, and performs it on a job.

The drawing is pure: a seed gives the same sequence everywhere. Each kind comes at least once in a sequence of
LEAST_FAULTS. A fault leaves at least one worker untouched, which holds the job's state.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.job import Job, Node
from tests.lab.wait import eventually

LEAST_FAULTS = 10
SAMPLES = 1152  # of the job: enough steps for as many faults
FIRST_WORKERS = 2  # of node 0, with which the job begins
MOST_NODES, MOST_WORKERS = 3, 4
NODES = f"1:{MOST_NODES}"  # the job's --nnodes


class Kind(Enum):
    """The value is what tables show."""

    JOIN = "joins"
    LEAVE = "leaves"
    WORKER_KILLED = "loses a worker, which is replaced"
    NODE_KILLED = "is killed"
    WORKER_FROZEN = "has a worker that stops, and is replaced"
    LOST_IN_COMMIT = "loses a worker behind its commit of a step"
    JOINER_LOST = "joins, and loses a worker that copies the state"
    ETCD_AWAY = "trains while etcd does not answer"


JOINS = (Kind.JOIN, Kind.JOINER_LOST)
LEAVES = (Kind.LEAVE, Kind.NODE_KILLED)
COMMIT, COPY = "commit.after", "heal.receive"
HANG_OPTIONS = ("--rdzv-conf", "hang_notice=1,hang_renew=2", "--hang-timeout", "6")
"""Of a job that is to notice a stopped worker."""

DEADLINE_S = 60.0


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
        if kind in JOINS:
            node, started = started, started + 1
            workers[node] = chance.randint(1, min(2, MOST_WORKERS - sum(workers.values())))
        elif kind in LEAVES:
            del workers[node]
        elif kind is not Kind.ETCD_AWAY:
            slot = chance.randrange(workers[node])
        faults.append(Fault(kind, node, sum(workers.values()), slot))
    return faults


def _possible(workers: dict[int, int]) -> Iterator[Kind]:
    yield Kind.ETCD_AWAY
    if len(workers) < MOST_NODES and sum(workers.values()) < MOST_WORKERS:
        yield from JOINS
    if len(workers) > 1:
        yield from LEAVES
    if sum(workers.values()) > 1:
        yield from (Kind.WORKER_KILLED, Kind.WORKER_FROZEN, Kind.LOST_IN_COMMIT)


def perform(job: Job, faults: Sequence[Fault], etcd: EmbeddedEtcd, deadline_s: float) -> None:
    """Runs the job to its end through these faults, and checks that each happened. deadline_s: of each node's end."""
    _Performance(job, etcd).run(faults, deadline_s)


class _Performance:
    def __init__(self, job: Job, etcd: EmbeddedEtcd) -> None:
        self._job, self._etcd = job, etcd
        self._holds = job.directory / "holds"
        self._holds.mkdir()
        self._nodes = {0: self._start(FIRST_WORKERS)}
        self._seen = 0

    def _start(self, workers: int) -> Node:
        points = ";".join(f"{point}=hold:{self._holds}" for point in (COMMIT, COPY))
        return self._job.start(slots=workers, failpoints=points)

    def run(self, faults: Sequence[Fault], deadline_s: float) -> None:
        job, world = self._job, FIRST_WORKERS
        self._seen = job.await_world(world, after_step=job.await_step(5))
        for fault in faults:
            self._happens(fault, world)
            world = fault.world
            self._seen = job.await_world(world, after_step=self._seen)
        job.hurry()
        for node in self._nodes.values():
            assert node.process.wait(deadline_s) == 0, node.log
        job.check(finished=world)

    def _happens(self, fault: Fault, world: int) -> None:
        kind, nodes = fault.kind, self._nodes
        if kind in JOINS:
            if kind is Kind.JOINER_LOST:
                (self._holds / COPY).touch()
            node = nodes[fault.node] = self._start(fault.world - world)
            if kind is Kind.JOINER_LOST:
                self._kill_held(COPY)
                node.await_line("ended: killed by SIGKILL")
        elif kind is Kind.LEAVE:
            nodes.pop(fault.node).send(signal.SIGINT)
        elif kind is Kind.NODE_KILLED:
            nodes.pop(fault.node).kill_agent()
        elif kind is Kind.ETCD_AWAY:
            self._etcd_away()
        elif kind is Kind.LOST_IN_COMMIT:
            (self._holds / COMMIT).touch()
            lost = self._said("ended: killed by SIGKILL")
            self._kill_held(COMMIT)
            self._await_said("ended: killed by SIGKILL", lost + 1)
            self._seen = self._job.await_world(world - 1, after_step=self._seen)
        else:
            self._lose(nodes[fault.node], fault.slot, frozen=kind is Kind.WORKER_FROZEN)
            self._seen = self._job.await_world(world - 1, after_step=self._seen)

    def _lose(self, node: Node, slot: int, *, frozen: bool) -> None:
        ended = f"worker in slot {slot} ended: {'hung' if frozen else 'killed by SIGKILL'}"
        before = node.log.count(ended)
        node.workers[slot].send(signal.SIGSTOP if frozen else signal.SIGKILL)
        node.await_line(ended, times=before + 1)

    def _kill_held(self, point: str) -> None:
        """Kills the worker that is held at the point, and holds no other."""

        def held() -> Path | None:
            return next(self._holds.glob(f"{point}.[0-9]*"), None)

        found = eventually(held, DEADLINE_S, f"a worker is held at {point}", 0.002)
        os.kill(int(found.name.rpartition(".")[2]), signal.SIGKILL)
        found.unlink()

    def _etcd_away(self) -> None:
        away, back = "etcd does not answer", "etcd answers again"
        before = {node: (node.log.count(away), node.log.count(back)) for node in self._nodes.values()}
        os.kill(self._etcd.pid, signal.SIGSTOP)
        try:
            for node, (times, _) in before.items():
                node.await_line(away, times=times + 1)
            self._seen = self._job.await_step(self._job.step + 2)
        finally:
            os.kill(self._etcd.pid, signal.SIGCONT)
        for node, (_, times) in before.items():
            node.await_line(back, times=times + 1)

    def _said(self, words: str) -> int:
        return sum(node.log.count(words) for node in self._nodes.values())

    def _await_said(self, words: str, times: int) -> None:
        eventually(lambda: self._said(words) >= times, DEADLINE_S, f"{words!r} is said {times} times", 0.05)


def in_words(seed: int, faults: Sequence[Fault]) -> str:
    """Names the seed, the faults, and the number of workers after each."""
    return f"seed {seed}: " + ", ".join(map(str, faults))
