"""Measures how much later than a foreground start a submitted job takes its first step.

    python -m benchmarks.submit_start --keep

Three hosts of the lab: one with etcd, one with the node's daemon, one with a person's terminal. From the command's
start to the first committed step, `bagua-launch` on the node itself and `bagua-launch submit` from the terminal in
turn, the same script and one worker. Needs root (network namespaces).
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
from tests.lab import namespaces
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("one_step.py")
REPEATS = 7
BOUND_S = 0.5
DEADLINE_S = 60.0
CONFIG = """
insecure = true
[etcd]
endpoints = ["{etcd}"]
[node]
name = "{name}"
slots = 1
[jobs]
users = ["root"]
environment = ["PYTHONPATH", "OMP_NUM_THREADS"]
[directories]
state = "{directory}/state"
log = "{directory}/log"
"""


class Bench:
    def __init__(self, lab: Lab) -> None:
        store, self._node, self._terminal = lab.hosts
        self._directory = lab.directory
        self._etcd = lab.etcd(store).endpoints
        path = f"{result_file.ROOT}:{result_file.ROOT / 'protos'}"
        self._env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "BAGUA_ETCD": self._etcd}
        self._jobs = 0

    def start_daemon(self) -> None:
        config = self._directory / "agent.toml"
        config.write_text(CONFIG.format(name="node", etcd=self._etcd, directory=self._directory))
        log = self._directory / "daemon.log"
        words = ["-m", "bagua_agent.service", "serve", "--plain-units", "--config", str(config)]
        self._node.run([sys.executable, *words], env=self._env, output=log)
        eventually(
            lambda: "schedules the cluster's jobs" in log.read_text(), DEADLINE_S, lambda: log.read_text()
        )
        self.submitted_s()  # an election is followed by a while in which nothing new is placed

    def foreground_s(self) -> float:
        return self._first_step_s(self._node, "--rdzv-id", "{job}")

    def submitted_s(self) -> float:
        return self._first_step_s(self._terminal, "submit", "--follow", "--name", "{job}", "--user", "root")

    def _first_step_s(self, host: Host, *words: str) -> float:
        self._jobs += 1
        job = f"job-{self._jobs}"
        records = self._directory / job
        said = [word.format(job=job) for word in words]
        env = ["--env", "PYTHONPATH,OMP_NUM_THREADS"] if "submit" in said else []
        began_s = time.time()
        process = host.run(
            [sys.executable, "-m", "bagua_launch", *said, *env, "--ledger", str(records), str(SCRIPT)],
            env=self._env,
            output=self._directory / f"{job}.log",
        )
        step_s = self._await_step(process, records)
        if (code := process.wait(DEADLINE_S)) != 0:
            raise RuntimeError(f"{job} ended with {code}\n{process.tail()}")
        return step_s - began_s

    @staticmethod
    def _await_step(process: LabProcess, records: Path) -> float:
        live = LiveLedger(records)

        def first() -> float | None:
            live.read_on()
            return live.steps[1].time_s if 1 in live.steps else None

        return eventually(first, DEADLINE_S, lambda: f"a first step\n{process.tail()}")


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
    foreground, submitted = [], []
    with Lab(3) as lab:
        bench = Bench(lab)
        bench.start_daemon()
        for _ in range(args.repeat):
            foreground.append(bench.foreground_s())
            submitted.append(bench.submitted_s())
    later_s = statistics.median(submitted) - statistics.median(foreground)
    head = ["start", "command to first step"]
    rows = [
        ["in the foreground", result_file.spread(foreground)],
        ["submitted", result_file.spread(submitted)],
        ["later by (medians)", f"{later_s:.2f} s, asked: at most {BOUND_S} s"],
    ]
    words = result_file.table(head, rows)
    print(words)
    if args.keep:
        values = {"foreground_s": foreground, "submitted_s": submitted}
        for path in result_file.keep("submit_start", about, words, values):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0 if later_s <= BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
