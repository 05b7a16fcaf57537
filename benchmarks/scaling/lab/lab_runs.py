"""Measures steps on lab hosts for the calibration: one job for each setting, algorithm and repeat. Needs root.

Agents are forked from a process that has imported everything (tests/lab/zygote.py). Six agents that import torch on two
processors take 12 s of a run, and what they still load when training has begun is in the steps that are measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from statistics import fmean

from benchmarks.algorithm_choices import Settings
from benchmarks.scaling.lab.observations import IN_CYCLES, Observation, Setting
from benchmarks.tradeoff_systems import RunFailed, await_all
from benchmarks.worker_environment import worker_environment
from tests.lab.network import Lab
from tests.lab.process import LabProcess

_START_S = 60.0
_SYNC_EVERY = Settings("sgd", lr=1e-3, adam_lr=1e-6).sync_every


class Measuring:
    """lab: with one host more than the largest setting has, for etcd. steps, window_s: at least, of a run."""

    def __init__(self, lab: Lab, steps: int = 5, window_s: float = 2.0, most_s: float = 12.0) -> None:
        self._lab = lab
        self._etcd_host = lab.hosts[-1]
        self._endpoints = lab.etcd(self._etcd_host).endpoints
        self._steps, self._window_s, self._most_s = steps, window_s, most_s
        self._jobs = 0

    def observe(self, settings: Sequence[Setting], algorithms: Sequence[str]) -> list[Observation]:
        """Raises RunFailed."""
        found = []
        for setting in settings:
            self._lab.shape(setting.rate)
            for algorithm in algorithms:
                steps: list[float] = []
                processors_s: list[float] = []
                for _ in range(setting.repeats):
                    began_s = time.monotonic()
                    counted, processor_s = self._run(setting, algorithm)
                    steps += counted
                    processors_s.append(processor_s)
                    took_s = time.monotonic() - began_s
                    print(f"{setting}, {algorithm}: {took_s:.0f} s in all", file=sys.stderr, flush=True)
                found.append(Observation(setting, algorithm, tuple(steps), fmean(processors_s)))
        self._lab.shape(None)
        return found

    def _run(self, setting: Setting, algorithm: str) -> tuple[list[float], float]:
        """Returns the steps that count, and the processor time of a worker in one of them."""
        self._jobs += 1
        out = self._lab.directory / f"scaling-{self._jobs}"
        out.mkdir()
        in_cycles = algorithm in IN_CYCLES
        words = ["-m", "benchmarks.scaling.lab.lab_worker", "--algorithm", algorithm, "--out", str(out)]
        words += ["--hosts", str(setting.hosts), "--sizes", ",".join(map(str, setting.sizes))]
        words += ["--compute-s", str(setting.compute_s), "--bucket-cap-mb", str(setting.bucket_cap_mb)]
        words += ["--steps", str(self._steps), "--window-s", str(self._window_s * (3 if in_cycles else 1))]
        words += ["--most-s", str(self._most_s)]
        if algorithm == "local_sgd":
            words += ["--cycle", str(_SYNC_EVERY)]
        hosts = self._lab.hosts[: setting.hosts]
        processes: list[LabProcess] = []
        try:
            for host in hosts:
                launch = ["-m", "bagua_launch", "--nnodes", str(setting.hosts)]
                launch += ["--rdzv-endpoint", self._endpoints, "--rdzv-id", f"scaling-{self._jobs}"]
                launch += ["--local-addr", host.address]
                env = worker_environment(GLOO_SOCKET_IFNAME="eth0")
                output = out / f"output-{host.name}.log"
                processes.append(host.run_agent([sys.executable, *launch, *words], env, output))
            await_all(processes, _START_S + 5 * self._most_s)
        finally:
            for host in hosts:
                host.kill_all()
        measured = json.loads((out / "0.json").read_text())
        found: list[float] = measured["step_s"]
        if not found:
            raise RunFailed(f"{setting}, {algorithm}: no step counts")
        return found, measured["processor_s"] / len(found)
