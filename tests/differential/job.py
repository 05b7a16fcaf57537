"""One elastic job of real worker processes under a history, without launcher, agents and etcd.

Owns the loop that starts workers, answers their hooks, sees them end and lets the leader decide. Workers were forked
before this process started its first thread; each waits at its gate until the history lets it begin.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, GenerationKind
from tests.differential.features import Features
from tests.differential.history import CHECKPOINT_EVERY, Event, History
from tests.differential.leader import JobFailed, Leader
from tests.differential.worker import NEVER, SKIP, Part, Prepared, prepare

# Gloo waits five times its connect timeout of 20 s for a connection that a lost worker keeps from being made.
LIMIT_S = 130.0
STACKS_S = 0.5
SCRIPT_POINTS = ("step", "part", "evaluation")


@dataclass
class EndedRun:
    """How the job went. failure: empty if it came to its end."""

    records: list[Generation] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    entered: dict[int, set[str]] = field(default_factory=dict)
    failure: str = ""

    @property
    def finishers(self) -> list[str]:
        return sorted(w for w, status in self.statuses.items() if status == 0)


class Job:
    """name: also the prefix of its workers' names. Made before the process has threads; `run` starts them."""

    def __init__(
        self, name: str, directory: Path, f: Features, history: History, *, with_checkpoints: bool = False
    ) -> None:
        self.name, self.directory, self.history = name, directory, history
        self.socket_path = str(directory / f"{name}.sock")
        self.with_checkpoints = with_checkpoints
        self._workers: dict[str, Prepared] = {}
        for number in range(history.workers):
            worker_id = self.worker_id(number)
            environment = WorkerEnvironment(
                job_id="differential",
                worker_id=worker_id,
                agent_id=f"n-{worker_id}",
                session_socket=self.socket_path,
                bind_host="127.0.0.1",
                slot=0,
                slots=1,
                ledger_dir=str(self.ledger_directory),
                failpoints=";".join(_failpoint(e) for e in self._kills(number)),
                # It ends a job whose workers differ; without it the comparison at the end says in what.
                digest_every_steps=f.seed % 2,
                checkpoint_dir=str(directory / "checkpoints") if with_checkpoints else "",
                checkpoint_every=str(CHECKPOINT_EVERY) if with_checkpoints else "",
            )
            part = Part(
                worker_id,
                number,
                f,
                history.events,
                environment.encode(),
                directory,
                settles=history.settled,
            )
            self._workers[worker_id] = prepare(part)
        self._started: set[str] = set()
        self._begun: set[int] = set()  # events
        self._held: dict[int, list[Prepared]] = {}  # event -> workers that wait for its record
        self._committed_in = 0  # a generation in which a worker says that it has committed
        self._ended = EndedRun()

    @property
    def ledger_directory(self) -> Path:
        return self.directory / ("ledger" if self.with_checkpoints else f"ledger-{self.name}")

    def worker_id(self, number: int) -> str:
        return f"{self.name}{number}"

    def _kills(self, number: int) -> list[Event]:
        return [
            e
            for e in self.history.events
            if e.kind == "kill" and e.worker == number and e.point not in SCRIPT_POINTS
        ]

    # -- running

    def run(self) -> EndedRun:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        self._leader = Leader(
            self.socket_path,
            f"nonce-{self.name}",
            self.history.first,
            least=self.history.least,
            has_checkpoints=self.with_checkpoints,
            is_alive=self._is_alive,
            notify=lambda: os.write(wake_write, b"w"),  # type: ignore[arg-type, return-value]
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake_read, selectors.EVENT_READ, wake_read)
        for number in range(self.history.first):
            self._start(self.worker_id(number))
        until_s = time.monotonic() + LIMIT_S
        try:
            while self._started - self._ended.statuses.keys():
                self._turn()
                if time.monotonic() > until_s:
                    raise JobFailed(f"not over after {LIMIT_S:g} s")
        except JobFailed as error:
            self._ended.failure = str(error)
            self._save_stacks()
        finally:
            self._selector.close()
            for worker in self._workers.values():
                if worker.worker_id not in self._ended.statuses:
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)
        self._ended.records, self._ended.entered = self._leader.records, self._leader.entered
        return self._ended

    def _turn(self) -> None:
        """Ends of workers first: what the others say of them means less than that."""
        wake_at_s = self._leader.wake_at_s
        wait_s = 0.25 if wake_at_s is None else min(0.25, max(0.0, wake_at_s - time.monotonic()))
        hooks = []
        for key, _ in self._selector.select(wait_s):
            if isinstance(key.data, int):
                _drain(key.data)
            elif isinstance(key.data, Prepared):
                hooks.append(key.data)
            else:
                self._reap(key.data[0])
        self._leader.work()
        for worker in hooks:
            self._asked(worker)
        self._answer_held()

    def _start(self, worker_id: str) -> None:
        worker = self._workers[worker_id]
        self._leader.add_worker(worker_id)
        self._started.add(worker_id)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, (worker,))
        self._selector.register(worker.hooks, selectors.EVENT_READ, worker)
        worker.open_gate()

    def _is_alive(self, worker_id: str) -> bool:
        if worker_id not in self._ended.statuses and worker_id in self._started:
            self._reap(self._workers[worker_id])
        return worker_id in self._started and worker_id not in self._ended.statuses

    def _reap(self, worker: Prepared) -> None:
        if worker.worker_id in self._ended.statuses:
            return
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            return
        self._ended.statuses[worker.worker_id] = os.waitstatus_to_exitcode(status)
        self._selector.unregister(worker.pidfd)
        if worker.hooks in self._selector.get_map():
            self._selector.unregister(worker.hooks)
        self._leader.ended(worker.worker_id, self._ended.statuses[worker.worker_id])

    # -- events of the history

    def _asked(self, worker: Prepared) -> None:
        """A worker is at the step of a join or a leave; its answer may have to wait for the record."""
        try:
            message = worker.hooks.recv(64)
        except ConnectionError:
            message = b""
        if not message:
            if worker.hooks in self._selector.get_map():
                self._selector.unregister(worker.hooks)
            return
        event, own, committed = (int(word) for word in message.split())
        self._begin(event)
        newest = self._leader.newest
        assert newest is not None
        if committed:
            self._committed_in = max(self._committed_in, own)  # the word of it may still be on its way
        is_current = own == newest.number and self._is_committed()
        if self._record_of(event) or is_current or self._is_over(event):
            self._held.setdefault(event, []).append(worker)
        else:
            worker.hooks.send(SKIP)  # it has to follow a record first, and asks again at a later step

    def _begin(self, number: int) -> None:
        if number in self._begun:
            return
        self._begun.add(number)
        event = self.history.events[number]
        worker_id = self.worker_id(event.worker)
        if event.kind == "join":
            self._start(worker_id)
        elif self._is_alive(worker_id):
            self._leader.ask_to_leave(worker_id)

    def _record_of(self, number: int) -> int:
        """Number of the newest record if it does what the event asks for, else 0."""
        event, newest = self.history.events[number], self._leader.newest
        assert newest is not None
        is_in = newest.placement_of(self.worker_id(event.worker)) is not None
        return newest.number if is_in == (event.kind == "join") else 0

    def _answer_held(self) -> None:
        """Those whose record stands go on; and all, if they have to follow a loss first."""
        for event, workers in list(self._held.items()):
            number = self._record_of(event)
            is_waiting = self._is_committed() or self._leader.records[-1].kind is GenerationKind.PLANNED
            if self._is_over(event):
                answer = NEVER
            elif number:
                answer = b"%d" % number
            elif is_waiting:
                continue
            else:
                answer = SKIP
            for worker in workers:
                if self._is_alive(worker.worker_id):
                    worker.hooks.send(answer)
            del self._held[event]

    def _is_committed(self) -> bool:
        newest = self._leader.newest
        assert newest is not None
        return self._leader.is_committed or self._committed_in == newest.number

    def _is_over(self, number: int) -> bool:
        """The event can't happen any more, or needs no record: its worker is gone."""
        event = self.history.events[number]
        return event.kind == "join" and self.worker_id(event.worker) in self._ended.statuses

    def _save_stacks(self) -> None:
        """Every living worker writes its stacks into its log."""
        for worker_id in self._started:
            if worker_id not in self._ended.statuses:
                os.kill(self._workers[worker_id].pid, signal.SIGUSR1)
        time.sleep(STACKS_S)  # they are about to be killed; a file that stays empty costs nothing


def _failpoint(event: Event) -> str:
    return f"{event.point}=kill" + ("" if event.at is None else f"@{event.at}")


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return
