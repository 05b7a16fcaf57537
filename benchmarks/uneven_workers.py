"""Measures the throughput of workers of different speeds: four lab hosts, one three times slower.

    python -m benchmarks.uneven_workers --keep

Speeds are made by sleeping for each sample, since the hosts share this machine's processors. A system's throughput is
measured between the first fifth and the last twentieth of its samples, and compared with the sum of the workers' own
speeds, each of which trains alone in the same run. torch's DDP runs beside Bagua's algorithms. Needs root (network
namespaces).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import result_file
from benchmarks.result_file import circumstances, in_words, keep, table
from benchmarks.worker_environment import worker_environment
from tests.lab.network import Host, Lab

HOSTS = 4
SLOWER = 3.0
SAMPLE_S = 0.0005
SYNC_EVERY = 50
EPOCHS = 5  # of 176 steps
EPOCHS_ALONE = 1
BETWEEN = (0.2, 0.95)  # parts of all samples
DEADLINE_S = 180.0
SYSTEMS = {
    "ddp": "torch's DDP, torchrun",
    "gradient_allreduce": "gradient_allreduce",
    "step": "local_sgd, unit step",
    "round": "local_sgd, unit round",
    "async": "async, unit step",
    "async_round": "async, unit round",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """samples_per_s: of all workers together; of: that over the sum of their own speeds."""

    system: str
    seed: int
    samples_per_s: float
    of: float
    training: float
    held_out: float


def throughput(directory: Path) -> float:
    """Samples per second of all workers, by their logs."""
    lines = sorted(
        (float(time_s), int(samples))
        for file in directory.glob("*.log")
        for time_s, samples in (line.split() for line in file.read_text().splitlines())
    )
    whole, done = sum(samples for _, samples in lines), 0
    window: list[tuple[float, int]] = []
    for time_s, samples in lines:
        done += samples
        if BETWEEN[0] * whole <= done <= BETWEEN[1] * whole:
            window.append((time_s, samples))
    return sum(samples for _, samples in window[1:]) / (window[-1][0] - window[0][0])


class Bench:
    def __init__(self, lab: Lab, directory: Path, epochs: int) -> None:
        self._lab = lab
        self._epochs = epochs
        self._directory = directory
        self._endpoint = lab.etcd(lab.hosts[0]).endpoints
        self._jobs = 0

    def alone_per_s(self) -> float:
        """The sum of the workers' own speeds: (HOSTS - 1) fast ones and a slow one."""
        return (HOSTS - 1) * self._own_speed(1.0) + self._own_speed(SLOWER)

    def _own_speed(self, slower: float) -> float:
        out = self._new()
        words = [sys.executable, *self._worker("step", out, "alone", slower, EPOCHS_ALONE, 0)]
        self._finish([self._run(self._lab.hosts[0], words)])
        return throughput(out)

    def trial(self, system: str, seed: int, alone_per_s: float) -> Trial:
        out = self._new()
        processes = []
        for number, host in enumerate(self._lab.hosts):
            slower = SLOWER if number == HOSTS - 1 else 1.0
            worker = self._worker(system, out, host.name, slower, self._epochs, seed)
            processes.append(self._run(host, [sys.executable, *self._launcher(system, host), *worker]))
        self._finish(processes)
        losses = json.loads((out / "losses.json").read_text())
        per_s = throughput(out)
        return Trial(system, seed, per_s, per_s / alone_per_s, losses["training"], losses["held out"])

    def _launcher(self, system: str, host: Host) -> list[str]:
        name = f"uneven-{self._jobs}"
        if system == "ddp":
            first = self._lab.hosts[0]
            words = ["-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", "1"]
            words += [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"{first.address}:29400",
                "--rdzv-id",
                name,
            ]
            return [*words, "--local-addr", host.address]
        words = ["-m", "bagua_launch", "--nnodes", str(HOSTS), "--nproc-per-node", "1"]
        return [*words, "--rdzv-endpoint", self._endpoint, "--rdzv-id", name, "--local-addr", host.address]

    def _worker(self, system: str, out: Path, name: str, slower: float, epochs: int, seed: int) -> list[str]:
        words = [str(Path(__file__).with_name("uneven_worker.py")), system, "--out", str(out), "--name", name]
        words += ["--sample-s", str(SAMPLE_S * slower), "--sync-every", str(SYNC_EVERY)]
        return [*words, "--epochs", str(epochs), "--seed", str(seed)]

    def _new(self) -> Path:
        self._jobs += 1
        out = self._directory / f"job-{self._jobs}"
        out.mkdir()
        return out

    def _run(self, host: Host, words: list[str]):  # type: ignore[no-untyped-def]
        env = worker_environment(GLOO_SOCKET_IFNAME="eth0")
        return host.run(words, env=env, output=self._directory / f"output-{self._jobs}-{host.name}.log")

    def _finish(self, processes) -> None:  # type: ignore[no-untyped-def]
        for process in processes:
            if process.wait(DEADLINE_S) != 0:
                raise RuntimeError(f"{process} ended with {process.returncode}\n{process.text()}")


def report(trials: list[Trial]) -> str:
    rows = []
    for system, words in SYSTEMS.items():
        here = [trial for trial in trials if trial.system == system]
        if not here:
            continue
        rows.append(
            [
                words,
                result_file.spread([t.samples_per_s for t in here], "", 0),
                result_file.spread([t.of for t in here], ""),
                f"{statistics.median(t.training for t in here):.4f}",
                f"{statistics.median(t.held_out for t in here):.4f}",
            ]
        )
    head = ["system", "samples a second", "of the sum of own speeds", "training loss", "held-out loss"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--system", action="append", choices=list(SYSTEMS))
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of 176 steps; default %(default)s")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args()
    about = circumstances()
    trials = []
    with Lab(HOSTS) as lab, tempfile.TemporaryDirectory() as directory:
        bench = Bench(lab, Path(directory), options.epochs)
        for seed in range(options.repeat):
            alone_per_s = bench.alone_per_s()
            print(f"own speeds: {alone_per_s:.0f} samples a second in all", flush=True)
            for system in options.system or SYSTEMS:
                trials.append(bench.trial(system, seed, alone_per_s))
                print(trials[-1], flush=True)
    print(report(trials))
    if options.keep:
        part = result_file.part_of(options.system or [], SYSTEMS)
        keep("uneven_workers", about, report(trials), [asdict(trial) for trial in trials], part)
    print(in_words(about))


if __name__ == "__main__":
    main()
