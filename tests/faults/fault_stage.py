"""Brings a process to a point and waits until its job is whole again. A job of three nodes, with holds everywhere.

Owns the roles (leader, the process at the point, the node lost to provoke it), the holds at failpoints, and
the exit codes that nodes may have. What strikes is fault_strikes.py's; what must be true of any job job.py's.
"""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base import failpoints as agent_failpoints
from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_core.elastic import failpoints as worker_failpoints
from bagua_core.elastic.ledger.ledger import LedgerLine
from tests.faults import fault_table as table
from tests.faults.fault_table import Cell, Moment, Occasion, Who
from tests.faults.job import DEADLINE_S, START_S, Job, Node
from tests.lab.etcd import EtcdCluster
from tests.lab.ledger import decode_line
from tests.lab.network import Host, Lab
from tests.lab.wait import eventually

NODES = 3
EPOCH_STEPS = 4
STEP_S = 0.3
BATCH = 24
# How many seconds of training a job has for each cell: starts of workers, and of nodes where processors are few.
WORKER_STARTS_S = 10
NODE_STARTS_S = 25
SPARE_TRAINING_S = 10
# From the trigger until a process is at the point: a worker's start, where processors are few.
HELD_S = 30.0
# At the end all steps that are left come first.
END_S = 90.0
HOLDER_TIMEOUT_S = 8.0
ENDED = "ended: killed by SIGKILL; starting another"

OPTIONS = (
    "--max-restarts",
    "1000",
    "--rdzv-conf",
    f"hang_notice={table.HANG_NOTICE_S:g},hang_renew={table.HANG_RENEW_S:g},holder_timeout={HOLDER_TIMEOUT_S:g}",
    "--hang-timeout",
    f"{table.HANG_TIMEOUT_S:g}",
)


@dataclass(frozen=True, slots=True)
class Held:
    """The process held at a point, until `file` is removed."""

    node: Node
    pid: int
    file: Path

    def let_go(self) -> None:
        self.file.unlink(missing_ok=True)


class Commits:
    """The live ledger, read as it grows: when each step was first committed, and which workers wrote lately."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self.times: dict[int, float] = {}
        self.newest: dict[str, LedgerLine] = {}  # by worker: of the lines in its own file

    def look(self) -> None:
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as stream:
                stream.seek(self._read_bytes.get(path, 0))
                data = stream.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
            for text in whole.splitlines():
                if not text:
                    continue
                line = decode_line(text)
                self.times[line.step] = min(line.time, self.times.get(line.step, line.time))
                self.newest[path.stem] = line

    def after(self, since: float) -> list[float]:
        return sorted(t for t in self.times.values() if t > since)


class Stage:
    def __init__(self, make_job: Callable[..., Job], lab: Lab, cells: Sequence[Cell]) -> None:
        self.lab = lab
        self.cluster: EtcdCluster = lab.etcd(lab.hosts[0], members=3)
        training_s = SPARE_TRAINING_S + sum(
            NODE_STARTS_S if cell.starts_a_node else WORKER_STARTS_S for cell in cells
        )
        self.job: Job = make_job(
            endpoints=self.cluster.endpoints,
            nodes=f"1:{NODES}",
            samples=EPOCH_STEPS * BATCH,
            epochs=round(training_s / (EPOCH_STEPS * STEP_S)),
            script=["--evaluate", "--step-s", f"{STEP_S:g}"],
            options=OPTIONS,
        )
        self.hosts = lab.hosts[1 : 1 + NODES]
        self.nodes: dict[Host, Node] = {}
        self.codes: dict[Node, frozenset[int]] = {}
        self.commits = Commits(self.job.records)
        self.reach_the_end = frozenset({NODES})  # so many workers may
        self.wiped = False
        self._hurries = False

    # -- the job

    def begin(self) -> None:
        self.start_missing()
        self.await_whole(time.time())

    def start_missing(self) -> None:
        """A node on each host that has none."""
        for host in self.hosts:
            if host not in self.nodes or not self.nodes[host].process.is_running:
                self._start(host)

    def _start(self, host: Host) -> None:
        holds = self._holds(host)
        holds.mkdir(exist_ok=True)
        self.nodes[host] = self.job.start(
            host,
            failpoints=";".join(f"{p}=hold:{holds}" for p in sorted(worker_failpoints.POINTS)),
            agent_failpoints=";".join(f"{p}=hold:{holds}" for p in sorted(agent_failpoints.POINTS)),
        )
        self.codes[self.nodes[host]] = frozenset({0})

    def _holds(self, host: Host) -> Path:
        return self.job.directory / f"holds-{host.name}"

    def await_whole(self, since: float) -> None:
        """Until a step was committed after `since` by all three nodes' workers of now."""

        def whole() -> bool:
            self.commits.look()
            workers = [worker.worker_id for node in self.nodes.values() for worker in node.workers]
            lines = [self.commits.newest.get(worker) for worker in workers]
            return len(lines) == NODES and all(
                line is not None and line.time > since and line.world_size == NODES for line in lines
            )

        def going_on() -> bool:
            for node in self.nodes.values():
                assert node.process.is_running, f"{node.process} has ended\n{node.process.tail()}"
            return whole()

        eventually(going_on, START_S, lambda: f"a step of {NODES} workers after {since:.2f}", 0.02)

    def leader(self) -> Node:
        """Of now; waits for an election."""

        def leads() -> Node | None:
            value = self.value(JobKeys(self.job.job_id).leader)
            if value is None:
                return None
            address = pb.Leader.FromString(value).control_address.rpartition(":")[0]
            return next((n for h, n in self.nodes.items() if h.address == address), None)

        return eventually(leads, DEADLINE_S, "a leader", 0.02)

    def value(self, key: str) -> bytes | None:
        found = self.cluster.leader.call("kv/range", key=base64.b64encode(key.encode()).decode())
        return base64.b64decode(found["kvs"][0]["value"]) if found.get("kvs") else None

    def generation(self) -> Generation:
        """The newest record."""
        value = self.value(JobKeys(self.job.job_id).generation)
        assert value is not None
        return Generation.from_proto(pb.Generation.FromString(value))

    def await_all_nodes(self, before: Generation) -> float:
        """Until a newer generation of all nodes is there, with an agent that the one before has not: one that was
        decided before the fault may still list who is gone. When, by the wall clock."""
        known = {m.agent_id for m in before.members}

        def met() -> float:
            newest = self.generation()
            new = {m.agent_id for m in newest.members} - known
            return (
                time.time() if newest.number > before.number and newest.node_count == NODES and new else 0.0
            )

        return eventually(met, START_S, "a generation of all nodes", 0.02)

    def steps_lost(self) -> int:
        """As all workers so far have said."""
        return sum(node.log.count("did not happen") for node in self.job.nodes)

    def times_said(self, *words: str) -> int:
        """Lines of all nodes so far that hold all of `words`."""
        lines = [line for node in self.job.nodes for line in node.log.splitlines()]
        return sum(all(word in line for word in words) for line in lines)

    def await_steps(self, after: float) -> None:
        def committed() -> bool:
            self.commits.look()
            return bool(self.commits.after(after))

        eventually(committed, DEADLINE_S, lambda: f"a step after {after:.2f}", 0.02)

    # -- to the point

    def bring(self, moment: Moment, *, the_leader: bool) -> Held:
        """Trigger the event that brings a process to the point. the_leader: where any member would do, the leader's."""
        leader = self.leader()
        others = [node for node in self.nodes.values() if node is not leader]
        if moment.who is Who.SUCCESSOR:
            candidates = others
        else:
            candidates = [leader] if the_leader or moment.who is Who.LEADER else others[:1]
        self._lead_there(moment, candidates, leader, pawn=others[-1])
        return self.await_held(candidates, moment.point)

    def _lead_there(self, moment: Moment, candidates: Sequence[Node], leader: Node, pawn: Node) -> None:
        """pawn: the node that is lost for the trigger."""
        point, occasion = moment.point, moment.occasion
        newcomer = moment.who is Who.NEWCOMER
        if newcomer:
            self.end_worker(candidates[0])  # before its successor is asked to stand there
        self.ask(candidates, point)
        if newcomer:
            pass
        elif occasion in (Occasion.FAILOVER, Occasion.JOIN):
            self.end_worker(pawn)
            if occasion is Occasion.JOIN and point != "heal.send":
                # The loss leads past the same point: the second time it is the successor that comes in.
                first = self.await_held(candidates, point)
                self.ask(candidates, point)
                first.let_go()
        elif occasion is Occasion.NODE_LOST:
            self.kill_agent(pawn)
        elif occasion is Occasion.LEADER_LOST:
            self.kill_agent(leader)
        elif occasion is Occasion.HANG:
            pawn.workers[0].send(signal.SIGSTOP)
        elif occasion is Occasion.END:
            self.hurry()

    def end_worker(self, node: Node) -> None:
        ended = _ended(node)
        node.workers[0].kill()
        node.await_line(ENDED, times=ended + 1)

    def kill_agent(self, node: Node) -> None:
        node.kill_agent()
        self.codes[node] = frozenset({-signal.SIGKILL})

    def ask(self, nodes: Iterable[Node], point: str, text: str = "") -> None:
        for node in nodes:
            assert node.host is not None
            (self._holds(node.host) / point).write_text(text)

    def await_held(self, candidates: Sequence[Node], point: str) -> Held:
        """The first of `candidates` that stands at the point; others may come to stand there too."""
        held = eventually(
            lambda: self.standing(candidates, point),
            END_S if self._hurries else HELD_S,
            lambda: f"one of {[n.process for n in candidates]} stands at {point}",
            0.002,
        )
        assert held.pid in (held.node.pid, *(worker.pid for worker in held.node.workers))
        return held

    def standing(self, candidates: Sequence[Node], point: str) -> Held | None:
        for node in candidates:
            assert node.host is not None
            for path in self._holds(node.host).glob(f"{point}.[0-9]*"):
                return Held(node, int(path.name.rpartition(".")[2]), path)
        return None

    def let_go(self) -> None:
        """No process is held at a point any more, or will be, including those that were asked and never came."""
        for host in self.hosts:
            for path in self._holds(host).iterdir():
                path.unlink(missing_ok=True)

    # -- the end

    def job_may_fail(self, code: int) -> None:
        """What fails after training was done may have been about to save the model; unless the job ended before."""
        for node in self.nodes.values():
            self.codes[node] = frozenset({0, code})
        self.reach_the_end = frozenset(range(NODES))

    def job_fails(self, code: int) -> None:
        """Of those that live."""
        for node in self.nodes.values():
            if node.process.is_running:
                self.codes[node] = frozenset({code})
        self.reach_the_end = frozenset({NODES - 1})

    def finish(self) -> None:
        """All nodes end, as they may."""
        self.hurry()
        self.await_the_end()

    def hurry(self) -> None:
        self._hurries = True
        self.job.hurry()

    def await_the_end(self) -> None:
        codes = {node: node.process.wait(END_S) for node in self.job.nodes}
        for node, code in codes.items():
            assert code in self.codes[node], f"{node.process} ended with {code}, not {set(self.codes[node])}"

    def check(self) -> None:
        """One history, equal states, no two generations of one number, nothing left."""
        reached = len(self.job.ends())
        assert reached in self.reach_the_end, f"{reached} workers reached the script's end"
        if reached:
            self.job.check(finished=reached)
        else:
            assert self.job.ledger.check(self.job.samples, self.job.epochs) == []
            self.job.check_nothing_left()
        if not self.wiped:
            numbers = [generation.number for generation in self.job.generations(self.cluster)]
            assert numbers == list(range(1, len(numbers) + 1)), "numbers grow by one, each is written once"


def _ended(node: Node) -> int:
    return sum(ENDED in line for line in node.log.splitlines())
