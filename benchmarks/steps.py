"""Measures the cost of a step under Bagua: beside DDP on the lab's hosts, and beside the bare loop on this one.

    python -m benchmarks.steps --keep

Three parts: plain allreduce against DDP (links unshaped and at 1 Gbit/s, small and large model), what the
elastic machinery adds to a tiny step, and the agent at rest. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.step_log import StepLogs
from benchmarks.worker_environment import worker_environment
from tests.lab import namespaces
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

SCRIPTS = result_file.ROOT / "benchmarks" / "rivals"
JOB_DEADLINE_S = 240.0
AT_REST_S = 20.0
_PORT = 29700


@dataclass(frozen=True, slots=True)
class Setting:
    """width: of the model's layers. steps: in a block."""

    model: str
    width: int
    rate: str | None
    steps: int


SETTINGS = (
    Setting("small", 512, None, 40),
    Setting("small", 512, "1gbit", 20),
    Setting("large", 2048, None, 8),
    Setting("large", 2048, "1gbit", 4),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    model: str
    parameters: int
    rate: str
    hosts: int
    bagua_s: tuple[float, ...]
    ddp_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.bagua_s) / statistics.median(self.ddp_s)


def start(host: Host | None, lab: Lab, options: Sequence[str], script: Sequence[str], log: str) -> LabProcess:
    """bagua-launch on a host of the lab, or on this machine."""
    env = worker_environment()
    words = [sys.executable, "-m", "bagua_launch", *options, *script]
    output = lab.directory / log
    if host is None:
        return LabProcess([], words, env=env, output=output, host_name="here")
    return host.run(words, env={**env, "GLOO_SOCKET_IFNAME": "eth0"}, output=output)


def compare(lab: Lab, endpoints: str, hosts: int, setting: Setting, number: int, blocks: int) -> Comparison:
    lab.shape(setting.rate)
    out = lab.directory / f"compared-{number}.json"
    script = [str(SCRIPTS / "steps_allreduce.py"), "--out", str(out), "--width", str(setting.width)]
    script += ["--steps", str(setting.steps), "--blocks", str(blocks)]
    script += ["--store", f"{lab.hosts[0].address}:{_PORT + number}"]
    nodes = ["--nnodes", str(hosts), "--rdzv-endpoint", endpoints, "--rdzv-id", f"steps-{number}"]
    processes = [
        start(h, lab, [*nodes, "--local-addr", h.address], script, f"steps-{number}-{h.name}.log")
        for h in lab.hosts[:hosts]
    ]
    for process in processes:
        code = process.wait(JOB_DEADLINE_S)
        if code != 0:
            raise RuntimeError(f"{process} failed\n{process.tail()}")
    lab.shape(None)
    found = json.loads(out.read_text())
    return Comparison(
        model=setting.model,
        parameters=found["parameters"],
        rate=setting.rate or "unshaped",
        hosts=found["world_size"],
        bagua_s=tuple(t for block in found["bagua_s"] for t in block),
        ddp_s=tuple(t for block in found["ddp_s"] for t in block),
    )


@dataclass(frozen=True, slots=True)
class Overhead:
    """Medians of one loop's blocks, in seconds a step."""

    loop: str
    bare_s: tuple[float, ...]
    ddp_s: tuple[float, ...]
    elastic_s: tuple[float, ...]

    def added_us(self, to: tuple[float, ...]) -> float:
        # pairs of blocks, since the machine's speed drifts
        return statistics.median(e - b for e, b in zip(self.elastic_s, to, strict=True)) * 1e6


def overhead(lab: Lab, loop: str) -> Overhead:
    out = lab.directory / f"overhead-{loop}.json"
    script = [str(SCRIPTS / "steps_overhead.py"), "--out", str(out), "--loop", loop]
    process = start(None, lab, ["--standalone"], script, f"overhead-{loop}.log")
    try:
        code = process.wait(JOB_DEADLINE_S)
    finally:
        process.kill()  # its worker goes with it
    if code != 0:
        raise RuntimeError(f"{process} failed\n{process.tail()}")
    found = json.loads(out.read_text())
    return Overhead(
        loop,
        tuple(statistics.median(block) for block in found["bare_s"]),
        tuple(statistics.median(block) for block in found["ddp_s"]),
        tuple(statistics.median(block) for block in found["elastic_s"]),
    )


@dataclass(frozen=True, slots=True)
class AtRest:
    role: str
    resident_bytes: int
    cpu_percent: float
    threads: int


def agents_at_rest(lab: Lab, endpoints: str) -> list[AtRest]:
    """Two agents, one of them the leader, while their workers train."""
    ledger = lab.directory / "at-rest"
    options = ["--nnodes", "2", "--rdzv-endpoint", endpoints, "--rdzv-id", "at-rest", "--ledger", str(ledger)]
    hosts, script = lab.hosts[:2], str(SCRIPTS / "train_bagua.py")
    agents = [
        start(h, lab, [*options, "--local-addr", h.address], [script], f"rest-{h.name}.log") for h in hosts
    ]
    logs = StepLogs(ledger)
    why = "a hundred lines in the ledger"
    eventually(lambda: len(logs.read_on()) > 100, JOB_DEADLINE_S, lambda: f"{why}\n{agents[0].tail()}", 0.1)
    before = [_cpu_s(a.pid) for a in agents]
    began_s = time.monotonic()
    time.sleep(AT_REST_S)  # the span that is measured
    elapsed_s = time.monotonic() - began_s
    found = []
    for agent, cpu_s in zip(agents, before, strict=True):
        lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        found.append(
            AtRest(
                "leader" if "this node leads" in agent.text() else "other agent",
                int(status["VmRSS"].split()[0]) * 1024,
                (_cpu_s(agent.pid) - cpu_s) / elapsed_s * 100,
                int(status["Threads"]),
            )
        )
    for host in hosts:
        host.kill_all()
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_words(
    comparisons: Sequence[Comparison], overheads: Sequence[Overhead], at_rest: Sequence[AtRest]
) -> str:
    parts = []
    if comparisons:
        rows = [
            [
                f"{c.model}, {c.parameters / 1e6:.1f} M",
                str(c.hosts),
                c.rate,
                result_file.spread([t * 1e3 for t in c.bagua_s], "ms", 1),
                result_file.spread([t * 1e3 for t in c.ddp_s], "ms", 1),
                f"{c.ratio:.3f}",
            ]
            for c in comparisons
        ]
        head = ["model, parameters", "hosts", "link", "bagua", "torch DDP", "bagua / DDP"]
        parts += ["One step, plain allreduce over Gloo, one worker a host, blocks in turn:", ""]
        parts += [result_file.table(head, rows), ""]
    if overheads:
        rows = [
            [
                o.loop,
                result_file.spread([t * 1e6 for t in o.bare_s], "us", 0),
                result_file.spread([t * 1e6 for t in o.ddp_s], "us", 0),
                result_file.spread([t * 1e6 for t in o.elastic_s], "us", 0),
                f"{o.added_us(o.bare_s):.0f} us",
                f"{o.added_us(o.ddp_s):.0f} us",
            ]
            for o in overheads
        ]
        parts += ["A tiny step in a launched world of one, ledger off, medians of blocks in turn:", ""]
        head = ["loop", "bare torch", "torch DDP", "bagua", "over bare torch", "over torch DDP"]
        parts += [result_file.table(head, rows), ""]
    if at_rest:
        rows = [
            [a.role, f"{a.resident_bytes / 2**20:.0f} MiB", f"{a.cpu_percent:.2f} %", str(a.threads)]
            for a in at_rest
        ]
        parts += [f"An agent while its worker trains, over {AT_REST_S:g} s:", ""]
        parts += [result_file.table(["agent", "resident memory", "CPU", "threads"], rows), ""]
    return "\n".join(parts)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--hosts", type=int, default=3, choices=(2, 3))
    parser.add_argument("--blocks", type=int, default=4, help="blocks of steps of each system, in turn")
    parser.add_argument("--part", choices=("allreduce", "overhead", "agent"), action="append")
    parser.add_argument("--model", choices=("small", "large"), action="append")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args()
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    wanted = args.part or ["allreduce", "overhead", "agent"]
    about = result_file.circumstances()
    comparisons: list[Comparison] = []
    overheads: list[Overhead] = []
    at_rest: list[AtRest] = []
    with Lab(args.hosts + 1) as lab:
        if "overhead" in wanted:
            overheads = [overhead(lab, loop) for loop in ("loader", "next-step")]
        endpoints = lab.etcd(lab.hosts[-1]).endpoints
        if "allreduce" in wanted:
            chosen = [s for s in SETTINGS if not args.model or s.model in args.model]
            for number, setting in enumerate(chosen):
                found = compare(lab, endpoints, args.hosts, setting, number, args.blocks)
                comparisons.append(found)
                print(f"{setting}: bagua/DDP {found.ratio:.3f}", file=sys.stderr, flush=True)
        if "agent" in wanted:
            at_rest = agents_at_rest(lab, endpoints)
    words = in_words(comparisons, overheads, at_rest)
    print(words)
    if args.keep:
        values: dict[str, Any] = {
            "allreduce": [asdict(c) for c in comparisons],
            "overhead": [asdict(o) for o in overheads],
            "agents": [asdict(a) for a in at_rest],
        }
        for path in result_file.keep("steps", about, words, values):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
