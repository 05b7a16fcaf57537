"""The chaos job: its nodes on the lab's hosts, the current state of each node, and how it ended.

Owns starting `bagua-launch`, finding a node's worker, and the exit codes that are right. Knows nothing of schedules.
A worker is found as the process that has its ledger file open, however the agent started it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_schedule import NodeState
from benchmarks.committed_steps import LiveLedger
from benchmarks.result_file import ROOT
from benchmarks.step_writers import writers_on
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess

SCRIPT = ROOT / "benchmarks" / "chaos_train.py"
JOB_ID = "chaos"
SAMPLES = 2400
LOOK_EVERY_S = 0.02
RECENT_STEPS = 15  # a line is written a step after its commit; a busy machine is late by some more
KILLED = (-9,)
ENDED = (0,)
LEFT = (0, 143)  # 143: its workers had to be ended, or nothing had begun there


class ChaosError(RuntimeError):
    """The run can't go on: something did not come within its deadline."""


@dataclass(slots=True)
class Node:
    """One `bagua-launch`. codes: the exit codes that are right by now; none while it shall run."""

    host: Host
    process: LabProcess
    begin_s: float  # since 1970
    codes: tuple[int, ...] = ()
    told: bool = field(default=False, repr=False)  # its wrong end is in the list of violations

    @property
    def pid(self) -> int:
        return self.process.pid


class ChaosJob:
    """script: further arguments of chaos_train.py. nodes: by number of their host, the running one or the last.
    violations: what must not have happened."""

    def __init__(self, lab: Lab, hosts: Sequence[Host], endpoints: str, script: Sequence[str] = ()) -> None:
        self.hosts = list(hosts)
        self.directory = lab.directory
        self.records = lab.directory / "ledger"
        self.out = lab.directory / "out"
        self.out.mkdir()
        self.records.mkdir()
        self.ledger = LiveLedger(self.records)
        self.nodes: dict[int, Node] = {}
        self.started: list[Node] = []
        self.violations: list[str] = []
        self._script = list(script)
        self._words = [sys.executable, "-m", "bagua_launch", "--nnodes", f"1:{len(hosts)}"]
        self._words += ["--rdzv-endpoint", endpoints, "--rdzv-id", JOB_ID, "--ledger", str(self.records)]

    # -- nodes

    def start(self, host: Host) -> Node:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_", "TORCH"))}
        temporary = self.temporary_directory(host)
        temporary.mkdir(exist_ok=True)
        env = {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
        }
        output = self.directory / f"terminal-{len(self.started) + 1}-{host.name}.log"
        words = [*self._words, "--local-addr", host.address, str(SCRIPT)]
        words += ["--out", str(self.out), "--samples", str(SAMPLES), *self._script]
        node = Node(host, host.run(words, env=env, output=output), time.time())
        self.nodes[host.number] = node
        self.started.append(node)
        return node

    def temporary_directory(self, host: Host) -> Path:
        """What /tmp is to a host: gone with it, looked through at the end."""
        return self.directory / f"tmp-{host.name}"

    def replace_disk(self, host: Host) -> None:
        """A host that was killed comes back as a new one."""
        shutil.rmtree(self.temporary_directory(host), ignore_errors=True)

    def running(self, host: Host) -> Node | None:
        """The node on `host` that is meant to run, and does."""
        node = self.nodes.get(host.number)
        return node if node is not None and not node.codes and node.process.is_running else None

    @property
    def running_count(self) -> int:
        """Nodes that are meant to run, and do."""
        return sum(1 for host in self.hosts if self.running(host) is not None)

    @property
    def world_size(self) -> int:
        """Of the newest committed step; 0 before the first."""
        newest = self.ledger.newest
        return newest.world_size if newest is not None else 0

    @property
    def generation(self) -> int:
        """Of the newest committed step; 0 before the first."""
        newest = self.ledger.newest
        return newest.generation if newest is not None else 0

    def is_busy(self, host: Host) -> bool:
        """A node that shall end may not have done so yet."""
        node = self.nodes.get(host.number)
        return node is not None and node.process.is_running

    def worker(self, host: Host) -> tuple[int, str] | None:
        """(process id, worker id) of the worker on `host` that has its ledger open."""
        return next(iter(writers_on(host, self.records)), None)

    def states(self, touched: set[int]) -> list[NodeState]:
        """touched: numbers of hosts that this window's events have hit."""
        self.ledger.read_on()
        found = []
        for host in self.hosts:
            if self.running(host) is None:
                if not self.is_busy(host):
                    found.append(NodeState(host.number, runs=False))
                continue
            worker = self.worker(host)
            written = self.ledger.workers.get(worker[1]) if worker else None
            is_recent = written is not None and written.newest_step >= self.ledger.newest_step - RECENT_STEPS
            found.append(NodeState(host.number, True, worker is not None, is_recent, host.number in touched))
        return found

    # -- waiting

    def await_steps(self, count: int, after_s: float, deadline_s: float) -> None:
        """Until `count` steps were committed after `after_s` (since 1970). Raises ChaosError."""
        self.until(lambda: self._steps_after(after_s) >= count, deadline_s, f"{count} more steps")

    def until(self, there: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Raises ChaosError when the deadline passes, or no node is left to do it."""
        end_s = time.monotonic() + deadline_s
        while True:
            self.ledger.read_on()
            if there():
                return
            self.look_at_ends()
            if time.monotonic() >= end_s:
                raise ChaosError(f"{what}: not within {deadline_s:g} s")
            if not any(node.process.is_running for node in self.nodes.values()):
                raise ChaosError(f"{what}: all nodes have ended")
            time.sleep(LOOK_EVERY_S)

    def _steps_after(self, after_s: float) -> int:
        count = 0
        for number in range(self.ledger.newest_step, 0, -1):
            step = self.ledger.steps.get(number)
            if step is not None and step.time_s <= after_s:
                break
            count += step is not None
        return count

    def look_at_ends(self) -> None:
        """Record one violation for each node that ended unexpectedly or with a wrong exit code."""
        for node in self.nodes.values():
            code = node.process.returncode
            if code is not None and code not in node.codes and not node.told:
                node.told = True
                due = " or ".join(map(str, node.codes)) or "going on"
                self.violations.append(
                    f"{node.process} ended with {code} instead of {due}; {_last(node.process)}"
                )

    def first_step_of(self, node: Node, until_s: float) -> float | None:
        """When a worker of this node committed first; until_s: the next node on its host began then."""
        name = re.compile(rf"{re.escape(node.host.name)}\b")
        times = [
            w.first_s
            for worker, w in self.ledger.workers.items()
            if name.match(worker) and node.begin_s < w.first_s < until_s
        ]
        return min(times, default=None)

    # -- the end

    def finish(self, deadline_s: float) -> None:
        """Let the job end, and all nodes with it. Raises ChaosError."""
        (self.out / "stop").touch()
        for node in self.nodes.values():
            node.codes = node.codes or ENDED
        end_s = time.monotonic() + deadline_s
        for node in self.nodes.values():
            try:
                node.process.wait(max(0.0, end_s - time.monotonic()))
            except AssertionError as error:  # LabProcess says so, with the end of its output
                raise ChaosError(str(error)) from None
        self.look_at_ends()
        self.ledger.read_on()


def _last(process: LabProcess) -> str:
    lines = process.tail(3).splitlines()
    return f"it said last: {lines[-1]}" if lines else "it said nothing"
