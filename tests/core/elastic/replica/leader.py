"""A job with replicas whose agents and leader are the test: real workers in processes, records that the test writes.

It decides as little as it can: K workers without a replica form one, all first replicas gather, each loss is followed
by a failover generation, each replica that comes to its loop by a planned one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagua_contract import session_pb2
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, GenerationKind, Placement, Stage
from bagua_contract.replica import Replica, ReplicaMember
from tests.core.elastic.agents import Agent
from tests.core.elastic.replica import sharded_training

DEADLINE_S = 90.0

_processes = multiprocessing.get_context("forkserver")
# An optimizer imports the second at its first step, which takes two seconds of processor time in each worker.
_processes.set_forkserver_preload(["tests.core.elastic.replica.sharded_training", "torch._dynamo"])


class Leader:
    def __init__(self, out: Path, replicas: int, size: int, **training: Any) -> None:
        self.out, self.size, self.first = out, size, replicas
        self._training = training
        self._lock = threading.RLock()
        self.agent = Agent(slots=64)
        self.agent.server._on_message = self._heard
        self._processes: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        # of replicas of which one was killed: its mate may fail by that before it is killed too
        self._over: set[str] = set()
        self._stages: dict[str, Stage] = {}
        self._replicas: list[tuple[str, ...]] = []
        self._since: dict[str, int] = {}
        self.generations: list[Generation] = []
        self.suspicions: list[tuple[str, str]] = []
        self._closing = False
        self._done: set[str] = set()
        for _ in range(replicas * size):
            self.start_worker()

    def start_worker(self) -> str:
        worker = f"w{len(self._processes)}"
        self.agent.server.expect(worker)
        environment = WorkerEnvironment(
            "job",
            worker,
            f"agent-{worker}",
            self.agent.socket,
            "127.0.0.1",
            0,
            1,
            ledger_dir=str(self.out / "ledger"),
            replica_size=self.size,
        ).encode()
        process = _processes.Process(
            target=sharded_training.train, args=(environment, self.out), kwargs=self._training, daemon=True
        )
        self._processes[worker] = process
        process.start()
        return worker

    def start_replica(self) -> None:
        for _ in range(self.size):
            self.start_worker()

    # -- what workers say

    def _heard(self, worker: str, message: session_pb2.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        with self._lock:
            if kind == "ready":
                self._addresses[worker] = message.ready.store_address
                self._stages[worker] = Stage(message.ready.stage)
                if self.generations:
                    self.agent.server.tell_generation(self.generations[-1], [worker])
                self._decide()
            elif kind == "suspected":
                self.suspicions.append((worker, message.suspected.detail))
            elif kind == "training_done":
                self._done.add(worker)
                if not self._closing:
                    self._closing = True
                    self.agent.server.tell_close()

    def _decide(self) -> None:
        assigned = {w for replica in self._replicas for w in replica}
        free = [w for w, s in self._stages.items() if s is Stage.ASSEMBLING and w not in assigned]
        if len(free) >= self.size:
            members = tuple(free[: self.size])
            record = Replica(
                f"r{len(self._replicas)}",
                tuple(ReplicaMember(w, f"agent-{w}", f"node-{w}", 0, self._addresses[w]) for w in members),
                "nonce-1",
            )
            self._replicas.append(members)
            told = session_pb2.AgentMessage(replica=record.to_proto())
            self.agent.server._tell(told, list(members))
        if not self.generations:
            waiting = [r for r in self._replicas if all(self._stages[w] is Stage.WAITING for w in r)]
            if len(waiting) == self.first:
                self._write(GenerationKind.GATHERING, waiting, base=0)
            return
        newest = self.generations[-1]
        listed = self._listed(newest)
        in_loop = [r for r in self._replicas if all(self._stages[w] is Stage.LOOP for w in r)]
        if newest.kind is GenerationKind.GATHERING:
            if all(r in in_loop for r in listed):
                self._write(GenerationKind.PLANNED, listed, base=0)
        elif new := [r for r in in_loop if r not in listed]:
            self._write(GenerationKind.PLANNED, [*listed, *new], base=newest.number)

    def _listed(self, record: Generation) -> list[tuple[str, ...]]:
        workers = {m.worker_id for m in record.members}
        return [r for r in self._replicas if set(r) <= workers]

    def _write(self, kind: GenerationKind, replicas: list[tuple[str, ...]], base: int) -> None:
        number = len(self.generations) + 1
        workers = [w for r in replicas for w in r]
        before = {m.worker_id for m in self.generations[-1].members} if self.generations else set()
        for w in workers:
            if w not in before or kind is GenerationKind.GATHERING or base == 0:
                self._since[w] = number
        record = Generation(
            number=number,
            base=base,
            kind=kind,
            members=tuple(
                Placement(
                    w,
                    f"agent-{w}",
                    f"node-{w}",
                    0,
                    rank,
                    rank,
                    0,
                    self._addresses[w],
                    self._since[w],
                    10 + rank,
                    True,
                    rank // self.size,
                    rank % self.size,
                )
                for rank, w in enumerate(workers)
            ),
            nonce="nonce-1",
            reason="a test",
        )
        self.generations.append(record)
        self.agent.server.tell_generation(record, [*workers, *self._addresses])

    # -- what happens

    def kill(self, worker: str) -> None:
        """SIGKILL it, then its mates, and write the failover generation. As agents do."""
        with self._lock:
            (replica,) = (r for r in self._replicas if worker in r)
            self._over.update(replica)
        for w in (worker, *(w for w in replica if w != worker)):
            self.kill_alone(w)
        self.fail_over(replica)

    def kill_alone(self, worker: str) -> None:
        """SIGKILL it. No agent acts on it."""
        process = self._processes[worker]
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE_S)
        self.agent.server.forget(worker)

    def fail_over(self, lost: tuple[str, ...] = ()) -> None:
        with self._lock:
            if lost:
                self._replicas.remove(lost)
                for w in lost:
                    self._stages.pop(w, None)
                    self._addresses.pop(w, None)
            newest = self.generations[-1]
            self._write(GenerationKind.FAILOVER, self._listed(newest), base=newest.number)

    @property
    def replicas(self) -> list[tuple[str, ...]]:
        with self._lock:
            return list(self._replicas)

    def await_replicas(self) -> list[tuple[str, ...]]:
        """Those of the first generation, once they are assembled."""
        self.await_true(lambda: len(self.replicas) == self.first, "the first replicas")
        return self.replicas

    def step_of(self, worker: str) -> int:
        try:
            return int((self.out / "steps" / worker).read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def await_true(self, claim: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not claim():
            ended = {w: p.exitcode for w, p in self._processes.items() if w not in self._over}
            died = [w for w, code in ended.items() if code not in (None, 0, -9)]
            assert not died, (what, {w: self.log(w) for w in died})
            assert time.monotonic() < until_s, (
                f"not in {DEADLINE_S} s: {what}",
                [(g.number, g.kind) for g in self.generations],
                self._stages,
                self.suspicions,
                {w: (p.exitcode, self.step_of(w), self.log(w)) for w, p in self._processes.items()},
            )
            time.sleep(0.01)

    def log(self, worker: str) -> str:
        path = self.out / f"log-{worker}"
        return path.read_text()[-3000:] if path.exists() else ""

    def await_ends(self) -> list[dict[str, Any]]:
        """The ends of all workers that were not killed, by global rank."""
        import torch

        self.await_true(lambda: len(self.generations) > 1, "the first generation")
        living = [w for r in self.replicas for w in r]
        ends = self.out / "ends"
        self.await_true(lambda: all((ends / f"{w}.pt").exists() for w in living), "all workers end")
        found = [torch.load(ends / f"{w}.pt") for w in living]
        return sorted(found, key=lambda end: tuple(end["place"]))

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()  # one that has just ended is not an error, as with os.kill: its parent is the fork server
            process.join(DEADLINE_S)
        self.agent.close()
