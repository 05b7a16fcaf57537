"""A real job for the fault tests: `bagua-launch` on the lab's hosts, what it says, what must be true of it.

Owns starting nodes, waiting on what they print and on the live ledger, and the checks at the end: exit codes,
every sample once, equal states, no process left. Knows nothing of particular faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from tests.lab import ledger, zygote
from tests.lab.etcd import EtcdCluster
from tests.lab.machine_load import MachineLoad
from tests.lab.network import Host
from tests.lab.process import LabProcess
from tests.lab.wait import eventually
from tests.lab.worker_stacks import stacks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train.py")
START_S = 40.0  # importing torch in several workers at once takes seconds where processors are few
DEADLINE_S = 40.0
SAMPLES, EPOCHS = 576, 2
BATCH = 24
STEPS = EPOCHS * SAMPLES // BATCH


@dataclass(frozen=True, slots=True)
class Worker:
    worker_id: str
    slot: int
    pid: int

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


class Node:
    """One `bagua-launch`. host None: this machine, without a lab."""

    def __init__(self, process: LabProcess, host: Host | None) -> None:
        self.process = process
        self.host = host

    @property
    def pid(self) -> int:
        """The agent's."""
        return self.process.pid

    @property
    def log(self) -> str:
        return self.process.text()

    @property
    def workers(self) -> list[Worker]:
        """Those that run, by slot."""
        found = []
        for child in _children(self.pid):
            environ = _environ(child)
            if "BAGUA_WORKER_ID" in environ:
                found.append(Worker(environ["BAGUA_WORKER_ID"], int(environ["BAGUA_SLOT"]), child.pid))
        return sorted(found, key=lambda w: w.slot)

    @property
    def family(self) -> list[int]:
        """Every process below the agent: workers, their loader processes, the guardian, an etcd."""
        return [p.pid for p in _children(self.pid, recursive=True)]

    def children_of(self, worker: Worker) -> list[int]:
        return [p.pid for p in _children(worker.pid, recursive=True)]

    def says(self, *words: str, times: int = 1) -> bool:
        """Whether `times` lines so far hold all of `words`."""
        return sum(all(w in line for w in words) for line in self.log.splitlines()) >= times

    @property
    def missed_a_peer(self) -> bool:
        """Whether workers here met a loss while they trained: in a step, which then did not happen, between two steps,
        where digests are compared, or as a generation without the lost one."""
        return any(
            self.says(words) for words in ("did not happen", "waits for another generation", "; lost ")
        )

    def await_line(self, *words: str, times: int = 1, deadline_s: float = DEADLINE_S) -> None:
        def said_or_ended() -> bool:
            if self.says(*words, times=times):
                return True
            assert self.process.is_running, f"{self.process} ended without saying {words}\n{self.log}"
            return False

        eventually(said_or_ended, deadline_s, lambda: f"{self.process} says {words}\n{self.log}", 0.05)

    def send(self, number: signal.Signals) -> None:
        self.process.send(number)

    def kill_agent(self) -> None:
        """SIGKILL of the agent alone."""
        self.process.kill()

    def freeze_agent(self) -> None:
        """SIGSTOP of the agent alone; returns when it has stopped."""
        self.send(signal.SIGSTOP)
        self.await_stopped()

    def await_stopped(self, deadline_s: float = DEADLINE_S) -> None:
        """Until the agent has been stopped, by this test or by a failpoint."""
        eventually(self._is_stopped, deadline_s, lambda: f"{self.process} stopped\n{self.log}")

    def _is_stopped(self) -> bool:
        return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def thaw_agent(self) -> None:
        self.send(signal.SIGCONT)


class Job:
    """A job and its records. `options` go to bagua-launch on every node, `script` to `file` (train.py); or `program` is
    run instead of that. A default job has STEPS steps: few, for each costs every worker some milliseconds of processor
    time, and the last of them slow, so that it waits for its test. A test that needs more steps gives more samples."""

    def __init__(
        self,
        directory: Path,
        *,
        endpoints: str | None = None,
        nodes: str = "1",
        options: Sequence[str] = (),
        samples: int = SAMPLES,
        epochs: int = EPOCHS,
        script: Sequence[str] = (),
        file: Path | None = None,
        program: Sequence[str] | None = None,
        imports: str = "",
    ) -> None:
        """imports: modules that the workers share, imported once in their warm parent (tests/lab/zygote.py)."""
        self.directory = directory
        self.endpoints = endpoints
        self.job_id = f"faults-{os.getpid()}-{directory.name}"[-60:]
        self.records = directory / "ledger"
        self.out = directory / "out"
        self.out.mkdir()
        self.samples = samples
        self.epochs = epochs
        self.nodes: list[Node] = []
        self._world_seen_at = 0
        self._load = MachineLoad()
        self._load.start()
        self._options = ["--nnodes", nodes, "--rdzv-id", self.job_id, "--ledger", str(self.records), *options]
        if endpoints:
            self._options += ["--rdzv-endpoint", endpoints]
        self._program = program
        self._imports = {zygote.IMPORTS_VARIABLE: imports} if imports else {}
        self._script = [
            str(file or SCRIPT),
            "--out",
            str(self.out),
            "--samples",
            str(samples),
            "--epochs",
            str(epochs),
            *script,
        ]

    # -- running

    def start(
        self,
        host: Host | None = None,
        *,
        slots: int = 1,
        failpoints: str = "",
        agent_failpoints: str = "",
        options: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Node:
        """slots: workers, unless the job's options or `options` have --nproc-per-node."""
        words = ["--nproc-per-node", str(slots), *self._options, *options]
        if failpoints:
            words += ["--failpoints", failpoints]
        points = {"BAGUA_AGENT_FAILPOINTS": agent_failpoints} if agent_failpoints else {}
        return self.launch(host, [*words, *(self._program or self._script)], {**environment, **points})

    def launch(
        self,
        host: Host | None,
        words: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Node:
        """A node by a command line of the test's own. words: behind `bagua-launch`, to the end."""
        command = [sys.executable, "-m", "bagua_launch", *words]
        process = _start_agent(host, command, self._log_file(), {**self._imports, **environment})
        node = Node(process, host)
        self.nodes.append(node)
        return node

    def scale(self, host: Host, nodes: str) -> None:
        self.command(host, "scale", nodes)

    def command(self, host: Host, name: str, *words: str) -> str:
        """What `bagua-launch NAME` says of this job, run to its end on `host`."""
        return self.run(host, name, "--rdzv-endpoint", str(self.endpoints), self.job_id, *words)

    def run(self, host: Host, *words: str) -> str:
        """What `bagua-launch WORDS` says, run to its end on `host`."""
        command = [sys.executable, "-m", "bagua_launch", *words]
        process = host.run(command, env=_environment(), output=self._log_file())
        assert process.wait(DEADLINE_S) == 0, process.text()
        return process.text()

    def _log_file(self) -> Path:
        return self.directory / f"terminal-{len(list(self.directory.glob('terminal-*')))}.log"

    def hurry(self) -> None:
        """Steps need not take their time any more: the test has seen what it came for."""
        (self.out / "hurry").touch()

    # -- watching

    @property
    def ledger(self) -> ledger.Ledger:
        return ledger.read(self.records)

    @property
    def step(self) -> int:
        """The newest committed step with a line."""
        lines = self.ledger.lines
        return lines[-1].step if lines else 0

    def await_step(self, step: int, deadline_s: float = START_S) -> int:
        self._await_in_ledger(lambda: self.step >= step, deadline_s, f"step {step} committed")
        return self.step

    def await_hanging_worker(self) -> None:
        """A worker hangs in a step, by `--hang-at`: from there a node can't leave, as it can before the first step."""
        eventually((self.out / "has-hung").exists, START_S, "a worker hangs in a step")

    def replace_killed_worker(self, node: Node) -> int:
        """Of two workers on `node` one is killed, and a successor joins; the first step by two again."""
        node.workers[1].kill()
        node.await_line("worker in slot 1 ended: killed by SIGKILL")
        alone = self.await_world(1)
        return self.await_world(2, after_step=alone)

    def await_world(self, size: int, after_step: int | None = None, deadline_s: float = START_S) -> int:
        """A committed step above `after_step` by `size` workers; the step.

        Without `after_step` it is one above the step of the last such wait: nodes start one by one, so a job of three
        has had steps by one and by two before a fault makes it smaller again.
        """
        above = self._world_seen_at if after_step is None else after_step

        def found() -> int:
            return next((x.step for x in self.ledger.lines if x.step > above and x.world_size == size), 0)

        what = f"a step by {size} workers after {above}"
        self._world_seen_at = self._await_in_ledger(found, deadline_s, what)
        return self._world_seen_at

    def await_stall(self, for_s: float, deadline_s: float = DEADLINE_S) -> int:
        """Until no step was committed for so long: the fault is there. The newest step."""
        newest, since_s = self.step, time.monotonic()

        def stalled() -> bool:
            nonlocal newest, since_s
            if (step := self.step) != newest:
                newest, since_s = step, time.monotonic()
            return time.monotonic() - since_s >= for_s

        eventually(stalled, deadline_s, lambda: f"no step for {for_s:g} s", 0.05)
        return newest

    def _await_in_ledger(self, found: Callable[[], int], deadline_s: float, what: str) -> int:
        """The first true value of `found`; a job that has ended writes no more."""

        def looked_for() -> int:
            runs = any(node.process.is_running for node in self.nodes)
            value = found()
            codes = [node.process.returncode for node in self.nodes]
            assert value or runs, f"all nodes have ended, with {codes}, without {what}"
            return value

        return eventually(looked_for, deadline_s, lambda: f"{what}\n{self._doing()}", 0.05)

    def _doing(self) -> str:
        """What a job does that does not come on: the stacks of its workers, and the last lines of its nodes."""
        shown = []
        for node in self.nodes:
            last = "\n".join(node.log.splitlines()[-15:])
            shown.append(f"---- {node.process}\n{stacks(w.pid for w in node.workers)}\n{last}")
        return "\n".join(shown)

    def last_world(self, size: int) -> int:
        """The newest step so far by `size` workers."""
        return max(line.step for line in self.ledger.lines if line.world_size == size)

    def largest_gap_s(self, after_step: int, before_step: int) -> float:
        """The longest time between the lines of two steps in a row, both within these bounds.

        By the clocks of the hosts that wrote them.
        """
        times: dict[int, float] = {}
        for line in self.ledger.lines:
            if after_step <= line.step <= before_step:
                times[line.step] = min(line.time, times.get(line.step, line.time))
        steps = sorted(times)
        assert steps == list(range(after_step, before_step + 1)), "every step has its line"
        return max(times[b] - times[a] for a, b in pairwise(steps))

    def measured(self, what: str, value_s: float, bound_s: float) -> None:
        """Print a duration of the last seconds for records, and assert its bound, longer on a busy machine."""
        crowding = self._load.mean_since(time.monotonic() - max(value_s, 10.0))
        limit_s = bound_s * crowding
        print(
            f"measured: {what}: {value_s:.2f} s (bound {bound_s:g} s, times {crowding:.1f} on this machine)"
        )
        assert value_s <= limit_s, f"{what} took {value_s:.2f} s, more than {limit_s:g} s"

    def generations(self, cluster: EtcdCluster) -> list[Generation]:
        """Every record of a generation that anybody wrote, in order, from etcd's own history."""
        changes = cluster.history(JobKeys(self.job_id).generation)
        values = [change.value for change in changes if change.value is not None]
        return [Generation.from_proto(pb.Generation.FromString(value)) for value in values]

    # -- the end

    def finish(self, codes: Sequence[int] | None = None, deadline_s: float = DEADLINE_S) -> None:
        """Let the job run to its end: all nodes end, with `codes` in order of their starts (default: 0)."""
        self.hurry()
        ended = [node.process.wait(deadline_s) for node in self.nodes]
        expected = [0] * len(ended) if codes is None else list(codes)
        assert ended == expected, f"exit codes {ended}, expected {expected}"

    def check(self, *, finished: int) -> None:
        """The promises: every sample once, `finished` workers end with the same state, nothing is left."""
        found = self.ledger
        assert found.check(self.samples, self.epochs) == []
        assert found.torn == 0
        ends = self.ends()
        assert len(ends) == finished, f"{[e['worker'] for e in ends]} reached the end"
        for what in ("parameters", "optimizer", "travelling", "scheduler", "critic"):
            assert len({e.get(what, "") for e in ends}) == 1, f"{what} differ: {ends}"
        for what in ("steps_of_scheduler", "steps_of_optimizer", "steps_of_critic", "batches_of_batch_norm"):
            assert {e.get(what, found.steps) for e in ends} == {found.steps}, f"{what}: {ends}"
        self.check_nothing_left()

    def ends(self) -> list[dict[str, Any]]:
        """What each worker wrote that reached its script's end."""
        return [json.loads(path.read_text()) for path in sorted((self.out / "ends").glob("*.json"))]

    def check_nothing_left(self, deadline_s: float = 5.0) -> None:
        """No process of the job lives; call it when all agents have ended."""

        def nothing() -> bool:
            return not self._left()

        eventually(nothing, deadline_s, lambda: f"processes left: {[_describe(p) for p in self._left()]}")

    def _left(self) -> list[int]:
        hosts = {node.host for node in self.nodes if node.host is not None}
        etcd = {m.process.pid for h in hosts for c in h.lab.clusters for m in c.members if m.process}
        left = [pid for host in hosts for pid in host.pids() if pid not in etcd]
        if any(node.host is None for node in self.nodes):
            left += [p.pid for p in psutil.process_iter() if _environ(p).get("BAGUA_JOB_ID") == self.job_id]
        return self.alive(left)

    @staticmethod
    def alive(pids: Sequence[int]) -> list[int]:
        return [pid for pid in pids if _is_alive(pid)]

    def end(self) -> None:
        """Kill what still runs, and print what was said: pytest shows it on failure."""
        self._load.stop()
        for node in self.nodes:
            family = node.family
            if node.process.is_running:
                node.process.kill()
            for pid in family:
                _kill(pid)
        for path in sorted(self.directory.glob("terminal-*")):
            print(f"---- {path.name}\n{path.read_text(errors='replace')}")


def _start_agent(
    host: Host | None, words: Sequence[str], output: Path, more: Mapping[str, str] = MappingProxyType({})
) -> LabProcess:
    env = _environment(more)
    if host is not None:
        return host.run_agent(words, env, output)
    forked = zygote.start(words, env, output, os.getcwd(), None) if zygote.can_start(words, env) else None
    return LabProcess([], words, env=env, output=output, host_name="here", forked=forked)


def _environment(more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_"))}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **more}


def _children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive))
    except psutil.NoSuchProcess:
        return []


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return {}  # it ended meanwhile, or is none of ours


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _describe(pid: int) -> str:
    try:
        return f"{pid}: {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.NoSuchProcess:
        return str(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it went with its agent
        os.kill(pid, signal.SIGKILL)
