"""A process that runs the drawn script: one plain process, or one worker of a job.

Processes are forked from one that has imported everything. A worker waits at its gate, takes its environment, runs the
script and leaves its final state in a file. `WorkerStage` asks the harness at the steps of joins and leaves.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from bagua_core.elastic.step import runtime
from tests.differential.features import Features
from tests.differential.history import Event
from tests.differential.script import Script
from tests.differential.shares import Shares

HOLD_LIMIT_S = 30.0
PR_SET_PDEATHSIG = 1
# Answers to a worker at the step of a join or a leave, besides a record's number: go on and ask at the next step; or
# never again.
SKIP, NEVER = b"skip", b"never"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A forked process that waits at its gate. hooks: the harness's end of its socket."""

    worker_id: str
    pid: int
    pidfd: int
    gate: int
    hooks: socket.socket

    def open_gate(self) -> None:
        os.write(self.gate, b"g")


@dataclass(frozen=True, slots=True)
class Part:
    """What one process is to do. environment: None for the plain process. number: see script.Stage. ledger: of the job
    whose shares the plain process repeats, if the mathematics depends on them."""

    worker_id: str
    number: int
    features: Features
    events: tuple[Event, ...]
    environment: Mapping[str, str] | None
    directory: Path
    ledger: Path | None = None
    settles: bool = False  # wait at each step until the checkpoints due by then are written


def prepare(part: Part) -> Prepared:
    """Fork it. To be called before this process starts any thread."""
    gate_read, gate_write = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(gate_write)
        _be(part, parent, gate_read, theirs)
    theirs.close()
    os.close(gate_read)
    return Prepared(part.worker_id, pid, os.pidfd_open(pid), gate_write, ours)


def state_file(directory: Path, worker_id: str) -> Path:
    return directory / f"{worker_id}.state"


def log_file(directory: Path, worker_id: str) -> Path:
    return directory / f"{worker_id}.log"


class PlainStage:
    number = 0

    def __init__(self, part: Part) -> None:
        self.shares = None if part.ledger is None else Shares(part.features, part.ledger)

    def reach(self, point: str, at: int) -> None:
        return None


class WorkerStage:
    """events: those of the whole history; this worker acts on kills of its own, and asks for joins and leaves."""

    def __init__(self, part: Part, hooks: socket.socket) -> None:
        self.number = part.number
        self.shares = None
        self._prefix = part.worker_id.removesuffix(str(part.number))
        self._hooks = hooks
        self._settles = part.settles
        self._waiting = {
            number: event
            for number, event in enumerate(part.events)
            if event.point in ("step", "part", "evaluation")
            and (event.kind != "kill" or event.worker == part.number)
        }

    def reach(self, point: str, at: int) -> None:
        if self._settles:
            checkpoints = runtime.engine()._checkpoints
            assert checkpoints is not None
            assert checkpoints._checkpointer.writer.wait(HOLD_LIMIT_S), "a checkpoint is not written"
        for number, event in list(self._waiting.items()):
            if event.point != point or event.at is None:
                continue
            if point == "evaluation" and event.kind != "kill" and at >= event.at:
                self._ask(number)
                self._waiting[number] = replace(event, point="step", at=0)  # what is left of it
                continue
            if event.kind == "kill":
                if at == event.at:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif at >= event.at and not (self._has_membership(event) or self._ask(number)):
                del self._waiting[number]
            elif at >= event.at and self._has_membership(event) and self._has_committed():
                del self._waiting[number]  # before that commit a loss may undo it

    def _has_membership(self, event: Event) -> bool:
        """Whether the generation in force is as the event asks for."""
        member = runtime.engine().member
        assert member is not None and member.generation is not None
        is_in = member.generation.placement_of(f"{self._prefix}{event.worker}") is not None
        return is_in == (event.kind == "join")

    @staticmethod
    def _has_committed() -> bool:
        """Whether this worker has committed a step in the generation in force."""
        engine = runtime.engine()
        return engine.state.name.generation == engine.generation_number

    def _ask(self, number: int) -> bool:
        """Whether to ask again at the next step. A record that has the change is built here on return, or replaced."""
        engine = runtime.engine()
        self._hooks.settimeout(HOLD_LIMIT_S)
        self._hooks.send(b"%d %d %d" % (number, engine.generation_number, self._has_committed()))
        answer = self._hooks.recv(64)
        if answer in (SKIP, NEVER):
            return answer == SKIP
        due = int(answer)
        member = engine.member
        assert member is not None

        def settled() -> bool:
            newest = member.session.news.generation
            if member.number >= due:
                return True
            return newest is not None and (
                newest.number > due or (newest.number == due and member.switch_value() != 0.0)
            )

        until_s = time.monotonic() + HOLD_LIMIT_S
        with member.changed:
            while not settled():
                assert time.monotonic() < until_s, f"generation {due} was not built within {HOLD_LIMIT_S:g} s"
                member.changed.wait(0.05)
        return True


def _be(part: Part, parent: int, gate: int, hooks: socket.socket) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent or os.read(gate, 1) != b"g":
            os._exit(0)
        log = os.open(log_file(part.directory, part.worker_id), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        if part.environment is not None:
            os.environ.update(part.environment)
        # Torch throws its thread pool away in a forked process whose parent has set its size. Two threads that do so
        # at once find none ("Invalid thread pool!"), so it is done before there is a second one.
        torch.set_num_threads(1)
        code = _run(part, hooks)
    except BaseException:  # noqa: BLE001 - as the interpreter does; the exit code tells
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(part: Part, hooks: socket.socket) -> int:
    try:
        stage = PlainStage(part) if part.environment is None else WorkerStage(part, hooks)
        run = Script(part.features, stage).train()
    except SystemExit as ending:
        code = int(ending.code or 0)
        runtime.shutdown(code)
        return code
    runtime.shutdown(0)
    file = state_file(part.directory, part.worker_id)
    left = {"state": _flat(run.state()), "samples": run.samples, "bodies": run.bodies}
    torch.save(left, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)
    return 0


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested dictionaries and lists by path; leaves are tensors, numbers, strings and None."""
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {path: value.detach().clone() if isinstance(value, torch.Tensor) else value}
    found = {path: len(items)} if path else {}
    for key, item in items:
        found |= _flat(item, f"{path}.{key}" if path else str(key))
    return found
