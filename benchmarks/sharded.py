"""Measures sharded replicas beside torch's HSDP: step time, memory of a worker, a lost host and a join.

    python -m benchmarks.sharded --keep

Six lab hosts of one worker each are three replicas of two, with Gloo on the processor. Both systems train the model of
examples/fsdp_lm.py, in blocks that alternate: a block is a job of its own. A fault trial is a job of Bagua's in which
a host is killed and started again; torch's HSDP has none, for it restarts. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bagua_agent.base.plain_text import counted
from benchmarks import result_file
from benchmarks.result_file import circumstances, in_words, keep, spread, table
from benchmarks.worker_environment import worker_environment
from tests.lab.network import Host, Lab
from tests.lab.wait import eventually

HOSTS, REPLICA_SIZE = 6, 2
WARM_UP = 10  # steps of a block that don't count
FAULT_STEPS = 2000
DEADLINE_S = 300.0
PARTS = ("blocks", "faults")


class Model(NamedTuple):
    """Of examples/fsdp_lm.py."""

    width: int
    blocks: int


LIGHT = Model(48, 2)  # whose steps are short beside what a change of membership costs


@dataclass(frozen=True, slots=True)
class Line:
    """The begin of a step on one worker. time_s: monotonic. committed: steps before it. cpu_s: of the process, all its
    threads."""

    time_s: float
    committed: int
    replicas: int
    anonymous_bytes: int
    cpu_s: float


def lines_of(file: Path) -> list[Line]:
    """Those that were written whole."""
    text = file.read_text() if file.exists() else ""
    words = [line.split() for line in text.rpartition("\n")[0].splitlines()]
    return [Line(float(t), int(c), int(r), int(b), float(cpu)) for t, c, r, b, cpu in words]


@dataclass(frozen=True, slots=True)
class Block:
    """Of all workers: the median step, the mean time of the processor in a worker's step, and what a worker has grown
    by since before its model was made."""

    system: str
    step_s: float
    cpu_s: float
    grown_bytes: float
    peak_bytes: float


def block_of(system: str, logs: Sequence[Sequence[Line]], before_bytes: Sequence[int]) -> Block:
    steps = [later.time_s - line.time_s for log in logs for line, later in pairwise(log[WARM_UP:])]
    grown = [
        statistics.median(line.anonymous_bytes for line in log[WARM_UP:]) - before
        for log, before in zip(logs, before_bytes, strict=True)
    ]
    peak = [
        max(line.anonymous_bytes for line in log) - before
        for log, before in zip(logs, before_bytes, strict=True)
    ]
    cpu = [(log[-1].cpu_s - log[WARM_UP].cpu_s) / (len(log) - 1 - WARM_UP) for log in logs]
    return Block(system, statistics.median(steps), statistics.mean(cpu), statistics.median(grown), max(peak))


@dataclass(frozen=True, slots=True)
class Fault:
    """next_step_s: from the kill until the last survivor has committed a step without the lost replica. beyond_s: the
    failed step and its repetition, less a usual step with the lost replica and one without it. join_s: from
    the host's start until all have begun a step of three replicas. pause_s: the survivors' longest gap between two
    begins in the join, less their usual one of two replicas; three_pause_s: less that of three replicas, whose workers
    share the processors. step_s: the median one of three replicas before the loss. width, blocks: of the model."""

    width: int
    blocks: int
    step_s: float
    next_step_s: float
    beyond_s: float
    join_s: float
    pause_s: float
    three_pause_s: float


def next_step_s(logs: Sequence[Sequence[Line]], killed_s: float, replicas: int) -> float | None:
    """None: some survivor has committed no step of `replicas` replicas since."""
    times = []
    for log in logs:
        after = [line for line in log if line.time_s > killed_s and line.replicas == replicas]
        times.append(next((line.time_s for line in after if line.committed > after[0].committed), None))
    known = [t for t in times if t is not None]
    return max(known) - killed_s if len(known) == len(times) else None


def beyond_s(logs: Sequence[Sequence[Line]], killed_s: float, replicas: int) -> float:
    """What the loss cost the slowest survivor beside the two steps that it computed: from the begin of the step that
    failed until the end of its repetition, less the median steps of before and after. replicas: that are left."""
    costs = []
    for log in logs:
        again = next(k for k, line in enumerate(log) if line.time_s > killed_s and line.replicas == replicas)
        gaps = [(later.time_s - line.time_s, line) for line, later in pairwise(log)]
        before = [gap for gap, line in gaps[: again - 1] if line.replicas > replicas]
        after = [gap for gap, line in gaps[again + 1 :] if line.replicas == replicas]
        took_s = log[again + 1].time_s - log[again - 1].time_s
        costs.append(took_s - statistics.median(before[-WARM_UP:]) - statistics.median(after[:WARM_UP]))
    return max(costs)


def pause_s(
    logs: Sequence[Sequence[Line]], begun_s: float, ended_s: float, quiet_s: tuple[float, float]
) -> float:
    """The longest gap between two begins from begun_s to ended_s, less the median one within quiet_s."""
    longest = []
    for log in logs:
        gaps = [(a.time_s, b.time_s) for a, b in pairwise(log)]
        usual = statistics.median(b - a for a, b in gaps if quiet_s[0] <= a and b <= quiet_s[1])
        longest.append(max(b - a for a, b in gaps if b >= begun_s and a <= ended_s) - usual)
    return max(0.0, *longest)


class Bench:
    def __init__(self, lab: Lab, directory: Path, options: argparse.Namespace) -> None:
        self._directory = directory
        self._options = options
        self._hosts = lab.hosts[:HOSTS]
        # on a host of its own: a fault trial ends all processes of the others
        self._endpoint = lab.etcd(lab.hosts[HOSTS]).endpoints
        self._jobs = 0

    def block(self, system: str) -> Block:
        out = self._new()
        options = self._options
        model = Model(options.width, options.blocks)
        processes = [self._run(system, host, out, options.steps, model) for host in self._hosts]
        for process in processes:
            if process.wait(DEADLINE_S) != 0:
                raise RuntimeError(f"{process} ended with {process.returncode}\n{process.text()}")
        names = [host.name for host in self._hosts]
        before = [int((out / f"{name}.before").read_text()) for name in names]
        return block_of(system, [lines_of(out / f"{name}.log") for name in names], before)

    def fault(self, model: Model) -> Fault:
        out = self._new()
        hosts = self._hosts
        for host in hosts:
            self._run("bagua", host, out, FAULT_STEPS, model)
        whole, left = HOSTS // REPLICA_SIZE, HOSTS // REPLICA_SIZE - 1

        survivors = list(hosts)

        def logs() -> list[list[Line]]:
            return [lines_of(out / f"{host.name}.log") for host in survivors]

        def trained(replicas: int, since_s: float, steps: int) -> bool:
            return all(
                sum(1 for line in log if line.time_s > since_s and line.replicas == replicas) >= steps
                for log in logs()
            )

        eventually(lambda: trained(whole, 0.0, 2 * WARM_UP), DEADLINE_S, "three replicas train", 0.05)
        replicas = {host.name: (out / f"{host.name}.replica").read_text() for host in hosts}
        survivors[:] = [h for h in hosts if replicas[h.name] != replicas[hosts[-1].name]]
        step_s = statistics.median(b.time_s - a.time_s for log in logs() for a, b in pairwise(log[WARM_UP:]))
        killed_s = time.monotonic()
        hosts[-1].kill_all()
        after = eventually(
            lambda: next_step_s(logs(), killed_s, left), DEADLINE_S, "the survivors go on", 0.05
        )
        quiet_from_s = time.monotonic()
        eventually(lambda: trained(left, quiet_from_s, 2 * WARM_UP), DEADLINE_S, "two replicas train", 0.05)
        beyond = beyond_s(logs(), killed_s, left)
        started_s = time.monotonic()
        self._run("bagua", hosts[-1], out, FAULT_STEPS, model)
        eventually(lambda: trained(whole, started_s, 1), DEADLINE_S, "a third replica joins", 0.05)
        joined_s = max(
            next(line.time_s for line in log if line.time_s > started_s and line.replicas == whole)
            for log in logs()
        )
        eventually(
            lambda: trained(whole, joined_s + 1.0, WARM_UP), DEADLINE_S, "three replicas train again", 0.05
        )
        found = Fault(
            *model,
            step_s,
            after,
            beyond,
            joined_s - started_s,
            pause_s(logs(), started_s, joined_s + 1.0, (quiet_from_s, started_s)),
            pause_s(logs(), started_s, joined_s + 1.0, (joined_s + 1.0, float("inf"))),
        )
        for host in hosts:
            host.kill_all()
        return found

    def _run(self, system: str, host: Host, out: Path, steps: int, model: Model) -> Any:
        o = self._options
        words = [
            str(Path(__file__).with_name("sharded_worker.py")),
            system,
            "--out",
            str(out),
            "--name",
            host.name,
        ]
        words += ["--steps", str(steps), "--batch", str(o.batch), "--replica-size", str(REPLICA_SIZE)]
        words += ["--width", str(model.width), "--blocks", str(model.blocks), "--sleep-s", str(o.sleep_s)]
        env = worker_environment(GLOO_SOCKET_IFNAME="eth0")
        output = self._directory / f"output-{self._jobs}-{host.name}.log"
        return host.run([sys.executable, *self._launcher(system, host), *words], env=env, output=output)

    def _launcher(self, system: str, host: Host) -> list[str]:
        name = f"sharded-{self._jobs}"
        common = ["--nproc-per-node", "1", "--rdzv-id", name, "--local-addr", host.address]
        if system == "hsdp":
            meeting = f"{self._hosts[0].address}:29400"
            words = ["-m", "torch.distributed.run", "--nnodes", str(HOSTS), *common]
            return [*words, "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
        nodes = f"{HOSTS - REPLICA_SIZE}:{HOSTS}"
        words = ["-m", "bagua_launch", "--nnodes", nodes, "--replica-size", str(REPLICA_SIZE), *common]
        return [*words, "--rdzv-endpoint", self._endpoint]

    def _new(self) -> Path:
        self._jobs += 1
        out = self._directory / f"job-{self._jobs}"
        out.mkdir()
        return out


def report(blocks: Sequence[Block], faults: Sequence[Fault]) -> str:
    rows = []
    for system in ("hsdp", "bagua"):
        here = [b for b in blocks if b.system == system]
        if here:
            rows.append(
                [
                    {"hsdp": "torch HSDP", "bagua": "Bagua"}[system],
                    spread([b.step_s * 1e3 for b in here], " ms", 1),
                    spread([b.cpu_s * 1e3 for b in here], " ms", 1),
                    spread([b.grown_bytes / 2**20 for b in here], " MiB", 1),
                    spread([b.peak_bytes / 2**20 for b in here], " MiB", 1),
                ]
            )
    parts = (
        [table(["system", "step", "processor in a worker's step", "memory of a worker", "its peak"], rows)]
        if rows
        else []
    )
    pairs = [
        b.step_s / a.step_s
        for a, b in zip(
            (b for b in blocks if b.system == "hsdp"),
            (b for b in blocks if b.system == "bagua"),
            strict=False,
        )
    ]
    if pairs:
        parts.append(f"Bagua's step over torch HSDP's, by pairs of blocks: {spread(pairs, '', 3)}")
    if faults:
        head = [
            "model",
            "its step",
            "host killed: next step",
            "beyond two steps",
            "join",
            "survivors' pause",
            "beyond a step of three",
        ]
        rows = []
        for model in dict.fromkeys(Model(f.width, f.blocks) for f in faults):
            here = [f for f in faults if (f.width, f.blocks) == model]
            rows.append(
                [
                    f"{model.width} wide, {counted(model.blocks, 'block')}",
                    spread([f.step_s for f in here], "s", 3),
                    spread([f.next_step_s for f in here]),
                    spread([f.beyond_s for f in here], "s", 3),
                    spread([f.join_s for f in here]),
                    spread([f.pause_s for f in here], "s", 3),
                    spread([f.three_pause_s for f in here], "s", 3),
                ]
            )
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def measured_part(sleep_s: float, parts: Sequence[str]) -> list[str]:
    """What the kept result's name says. With steps that sleep it is no newer result of the same measurement."""
    return [*result_file.part_of(parts, PARTS), *(["sleeping"] if sleep_s else [])]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=5, help="blocks of each system")
    parser.add_argument(
        "--faults",
        type=int,
        default=3,
        help="jobs in which a host is killed and comes again, of each of two models: this one and a light one",
    )
    parser.add_argument("--steps", type=int, default=60, help="of a block")
    parser.add_argument("--batch", type=int, default=24, help="of all replicas")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=4, help="of the model")
    parser.add_argument(
        "--sleep-s",
        type=float,
        default=0.0,
        help="of each step, behind its forward, with the processors free: stands for a device's work",
    )
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args()
    if options.repeat and options.steps < WARM_UP + 2:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} warm up; give at least {WARM_UP + 2}")
    about = circumstances()
    blocks: list[Block] = []
    faults: list[Fault] = []
    with Lab(HOSTS + 1) as lab, tempfile.TemporaryDirectory() as directory:
        bench = Bench(lab, Path(directory), options)
        for number in range(options.repeat):
            order = ("hsdp", "bagua") if number % 2 == 0 else ("bagua", "hsdp")
            for system in order:
                blocks.append(bench.block(system))
                print(blocks[-1], flush=True)
        for model in dict.fromkeys((Model(options.width, options.blocks), LIGHT)):
            for _ in range(options.faults):
                faults.append(bench.fault(model))
                print(faults[-1], flush=True)
    words = report(blocks, faults)
    print(words)
    if options.keep:
        keep(
            "sharded",
            about,
            words,
            {"blocks": [asdict(b) for b in blocks], "faults": [asdict(f) for f in faults]},
            measured_part(options.sleep_s, [n for n, f in (("blocks", blocks), ("faults", faults)) if f]),
        )
    print(in_words(about))


if __name__ == "__main__":
    main()
