"""Measures how soon `bagua-launch scale` takes effect on a job that daemons run.

    python -m benchmarks.scale_effect --keep

Four hosts of the lab: etcd, two nodes with daemons, a person's terminal. A job of one node is scaled to two, where a
worker must be started, and back; from the command's start to the first step committed by as many workers as were
asked for. Beside it the start of a job in the foreground, which is a worker's start. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import result_file
from benchmarks.committed_steps import LiveLedger
from benchmarks.submit_start import CONFIG
from tests.lab import namespaces
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("many_steps.py")
REPEATS = 5
DEADLINE_S = 60.0
WARM_STEPS = 20


class Bench:
    def __init__(self, lab: Lab) -> None:
        store, *self._nodes, self._terminal = lab.hosts
        self._directory = lab.directory
        self._etcd = lab.etcd(store).endpoints
        path = f"{result_file.ROOT}:{result_file.ROOT / 'protos'}"
        self._env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "BAGUA_ETCD": self._etcd}
        self._jobs = 0
        self.started_s: list[float] = []
        self.up_s: list[float] = []
        self.down_s: list[float] = []

    def start_daemons(self) -> None:
        logs = [self._start_daemon(node) for node in self._nodes]
        eventually(
            lambda: any("schedules the cluster's jobs" in log.read_text() for log in logs),
            DEADLINE_S,
            lambda: "\n".join(log.read_text() for log in logs),
        )

    def _start_daemon(self, node: Host) -> Path:
        directory = self._directory / node.name
        directory.mkdir()
        config = directory / "agent.toml"
        config.write_text(CONFIG.format(name=node.name, etcd=self._etcd, directory=directory))
        log = directory / "daemon.log"
        words = ["-m", "bagua_agent.service", "serve", "--plain-units", "--config", str(config)]
        node.run([sys.executable, *words], env=self._env, output=log)
        return log

    def trial(self) -> None:
        records = self._submitted()
        self._await_world(records, 1, after_step=WARM_STEPS)
        self.up_s.append(self._scaled("1:2", records, 2))
        self.down_s.append(self._scaled("1:1", records, 1))
        self._command("stop", f"job-{self._jobs}")
        self.started_s.append(self._foreground())

    def _submitted(self) -> Path:
        self._jobs += 1
        job = f"job-{self._jobs}"
        records = self._directory / job
        words = ["submit", "--name", job, "--nnodes", "1:1", "--user", "root", "--ledger", str(records)]
        self._command(*words, "--env", "PYTHONPATH,OMP_NUM_THREADS", str(SCRIPT))
        return records

    def _scaled(self, nodes: str, records: Path, world: int) -> float:
        """Seconds from the command's start."""
        live = LiveLedger(records)
        live.read_on()
        after_step, began_s = live.newest_step, time.time()
        self._command("scale", f"job-{self._jobs}", nodes)
        return self._await_world(records, world, after_step) - began_s

    def _foreground(self) -> float:
        records = self._directory / f"foreground-{self._jobs}"
        began_s = time.time()
        process = self._run(self._nodes[0], "--ledger", str(records), str(SCRIPT))
        started_s = self._await_world(records, 1, after_step=0) - began_s
        process.kill()
        process.wait(DEADLINE_S)
        return started_s

    def _await_world(self, records: Path, world: int, after_step: int) -> float:
        """When the first step after `after_step` was committed by so many workers, in seconds since 1970."""
        live = LiveLedger(records)

        def found() -> float | None:
            live.read_on()
            times = [s.time_s for s in live.in_order if s.step > after_step and s.world_size == world]
            return times[0] if times else None

        return eventually(found, DEADLINE_S, lambda: f"a step by {world} workers in {records}", 0.01)

    def _command(self, *words: str) -> None:
        process = self._run(self._terminal, *words)
        if (code := process.wait(DEADLINE_S)) != 0:
            raise RuntimeError(f"bagua-launch {' '.join(words)} ended with {code}\n{process.tail()}")

    def _run(self, host: Host, *words: str) -> LabProcess:
        log = self._directory / f"command-{len(list(self._directory.glob('command-*')))}.log"
        return host.run([sys.executable, "-m", "bagua_launch", *words], env=self._env, output=log)


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=REPEATS)
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    about = result_file.circumstances()
    with Lab(4) as lab:
        bench = Bench(lab)
        bench.start_daemons()
        for _ in range(args.repeat):
            bench.trial()
    extra_s = statistics.median(bench.up_s) - statistics.median(bench.started_s)
    rows = [
        ["a job's start in the foreground", result_file.spread(bench.started_s)],
        ["scaled from one node to two", result_file.spread(bench.up_s)],
        ["scaled from two nodes to one", result_file.spread(bench.down_s)],
        ["two nodes later than a start by (medians)", f"{extra_s:.2f} s"],
    ]
    words = result_file.table(["from the command's start to the first such step", ""], rows)
    print(words)
    if args.keep:
        values = {"started_s": bench.started_s, "up_s": bench.up_s, "down_s": bench.down_s}
        for path in result_file.keep("scale_effect", about, words, values):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
