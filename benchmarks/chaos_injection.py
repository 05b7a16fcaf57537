"""Injects events on the lab's hosts. Each begins at once; a lasting one ends when its time is over.

Owns signals, links and etcd's processes. chaos_schedule chooses the target of each event.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.chaos_job import KILLED, LEFT, ChaosJob, Node
from benchmarks.chaos_schedule import Event, Hit, Kind, choose
from tests.lab.etcd import EtcdCluster, EtcdMember
from tests.lab.network import Host


@dataclass(frozen=True, slots=True)
class Ending:
    """Something that lasts is to end at `due_s` of the monotonic clock."""

    due_s: float
    end: Callable[[], None]


class Injection:
    """`begin` acts an event out; `end_due` ends what has lasted long enough. joins: the nodes that joins started."""

    def __init__(self, job: ChaosJob, etcd: EtcdCluster) -> None:
        self._job = job
        self._etcd = etcd
        self._lasting: list[Ending] = []
        self.joins: dict[int, Node] = {}

    def begin(self, event: Event, what: Hit) -> None:
        if what.host is None:
            self._begin_etcds(event, what.kind)
            return
        host = next(h for h in self._job.hosts if h.number == what.host)
        if what.kind is Kind.NODE_JOINS:
            self.joins[event.number] = self._job.start(host)
            return
        node = self._job.nodes[host.number]
        if what.kind is Kind.AGENT_KILLED:
            node.codes = KILLED
            node.process.kill()
        elif what.kind is Kind.HOST_KILLED:
            node.codes = KILLED
            host.kill_all()
            self._job.replace_disk(host)
        elif what.kind is Kind.NODE_LEAVES:
            node.codes = LEFT
            node.process.send(signal.SIGTERM)
        elif what.kind is Kind.LINK_CUT:
            host.cut()
            self._later(event.length_s, host.heal)
        elif what.kind is Kind.AGENT_FROZEN:
            self._freeze(node.pid, event.length_s)
        else:
            self._hit_worker(host, what.kind, event.length_s)

    def _hit_worker(self, host: Host, kind: Kind, length_s: float) -> None:
        worker = self._job.worker(host)
        if worker is None:
            return  # it ended by itself in this moment, replaced by its agent
        pid, _ = worker
        if kind is Kind.WORKER_KILLED:
            _send(pid, signal.SIGKILL)
        elif kind is Kind.WORKER_FROZEN:
            self._freeze(pid, length_s)
        else:
            raise ValueError(f"{kind} is no fault of a worker")

    def _freeze(self, pid: int, length_s: float) -> None:
        _send(pid, signal.SIGSTOP)
        self._later(length_s, lambda: _send(pid, signal.SIGCONT))

    def _begin_etcds(self, event: Event, kind: Kind) -> None:
        members = list(self._etcd.members)
        if kind is Kind.ETCD_MEMBER_RESTARTED:
            chosen = choose(event.target, members)
            assert chosen is not None
            members = [chosen]
        # In order: etcd 3.5.1, which PyPI has, may lose its consistency when it is killed (etcd #13766). To the
        # agents it is the same: connections end, new ones are refused.
        for member in members:
            if member.process is not None:
                member.process.send(signal.SIGTERM)
        self._later(event.length_s, lambda: _start(members))

    def _later(self, length_s: float, end: Callable[[], None]) -> None:
        self._lasting.append(Ending(time.monotonic() + length_s, end))

    @property
    def next_due_s(self) -> float | None:
        return min((e.due_s for e in self._lasting), default=None)

    def end_due(self) -> None:
        """End what is due."""
        now_s = time.monotonic()
        for ending in [e for e in self._lasting if e.due_s <= now_s]:
            self._lasting.remove(ending)
            ending.end()


def _start(members: list[EtcdMember]) -> None:
    for member in members:
        member.stop()
        member.start()
    for member in members:
        member.await_healthy()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # its agent may have ended it meanwhile
        os.kill(pid, number)
