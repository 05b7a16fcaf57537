"""Measures what a lost host costs the others: within a round of local SGD, and within a step of gradient allreduce.

    python -m benchmarks.lost_in_round --keep

Four lab hosts of one worker each; one host is killed while all train. A pause is the longest time between two local
steps of a survivor, from the loss until ten seconds after it. Beside it stands the longest of the ten seconds before,
which is a usual average at the end of a round. Steps take the time that their workers sleep, since the hosts share this
machine's processors. Needs root (network namespaces).
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
from typing import NamedTuple

from benchmarks.result_file import circumstances, in_words, keep, spread, table
from benchmarks.worker_environment import worker_environment
from tests.lab.network import Host, Lab
from tests.lab.wait import eventually

HOSTS = 4
SAMPLE_S = 0.002  # 16 samples a step
SYNC_EVERY = 50
EPOCHS = 40  # more than a trial needs
WATCHED_S = 10.0  # before the loss, and after it
DEADLINE_S = 120.0
SYSTEMS = {"round": "local_sgd, unit round", "gradient_allreduce": "gradient_allreduce"}


class Step(NamedTuple):
    end_s: float  # monotonic
    samples: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Seconds of survivors: step_s the median time of a local step before the loss, usual_s the longest one, pause_s
    the longest one after it. kept: samples that the survivors trained in the ten seconds after the loss, over those in
    the ten before. Their steps have more samples then, since the batch is divided among fewer."""

    system: str
    step_s: float
    usual_s: float
    pause_s: float
    kept: float


def trial_of(system: str, logs: Sequence[Sequence[Step]], killed_s: float) -> Trial:
    """logs: of each survivor."""
    before, after = [], []
    for log in logs:
        steps = [(step.end_s, step.end_s - earlier.end_s, step.samples) for earlier, step in pairwise(log)]
        before += [(took, samples) for end, took, samples in steps if killed_s - WATCHED_S < end <= killed_s]
        after += [(took, samples) for end, took, samples in steps if killed_s < end <= killed_s + WATCHED_S]
    times = [took for took, _ in before]
    kept = sum(samples for _, samples in after) / sum(samples for _, samples in before)
    return Trial(system, statistics.median(times), max(times), max(took for took, _ in after), kept)


def steps_of(file: Path) -> list[Step]:
    """Those of a log of uneven_worker.py; a line that is not whole yet is left out."""
    text = file.read_text() if file.exists() else ""
    words = [line.split() for line in text.rpartition("\n")[0].splitlines()]
    return [Step(float(end_s), int(samples)) for end_s, samples in words]


class Bench:
    def __init__(self, lab: Lab, directory: Path) -> None:
        self._hosts = lab.hosts[:HOSTS]
        self._endpoint = lab.etcd(lab.hosts[HOSTS]).endpoints  # not on a host whose processes are ended
        self._directory = directory
        self._jobs = 0

    def trial(self, system: str) -> Trial:
        self._jobs += 1
        out = self._directory / f"job-{self._jobs}"
        out.mkdir()
        for host in self._hosts:
            self._run(system, host, out)
        *survivors, victim = self._hosts

        def logs() -> list[list[Step]]:
            return [steps_of(out / f"{host.name}.log") for host in survivors]

        eventually(lambda: all(logs()), DEADLINE_S, "all hosts train", 0.1)
        began_s = max(log[0].end_s for log in logs())
        eventually(
            lambda: all(log[-1].end_s > began_s + WATCHED_S + 2.0 for log in logs()),
            DEADLINE_S,
            "the job has trained for a while",
            0.1,
        )
        killed_s = time.monotonic()
        victim.kill_all()
        eventually(
            lambda: all(log[-1].end_s > killed_s + WATCHED_S for log in logs()),
            DEADLINE_S,
            "the survivors have gone on",
            0.1,
        )
        found = trial_of(system, logs(), killed_s)
        for host in self._hosts:
            host.kill_all()
        return found

    def _run(self, system: str, host: Host, out: Path) -> None:
        words = ["-m", "bagua_launch", "--nnodes", f"{HOSTS - 1}:{HOSTS}", "--nproc-per-node", "1"]
        words += ["--rdzv-endpoint", self._endpoint, "--rdzv-id", out.name, "--local-addr", host.address]
        words += [str(Path(__file__).with_name("uneven_worker.py")), system, "--out", str(out)]
        words += ["--name", host.name, "--sample-s", str(SAMPLE_S), "--sync-every", str(SYNC_EVERY)]
        env = worker_environment(GLOO_SOCKET_IFNAME="eth0")
        output = self._directory / f"output-{self._jobs}-{host.name}.log"
        host.run([sys.executable, *words, "--epochs", str(EPOCHS)], env=env, output=output)


def report(trials: Sequence[Trial]) -> str:
    rows = []
    for system, words in SYSTEMS.items():
        here = [trial for trial in trials if trial.system == system]
        if here:
            rows.append(
                [
                    words,
                    spread([t.step_s * 1e3 for t in here], "ms", 1),
                    spread([t.usual_s * 1e3 for t in here], "ms", 0),
                    spread([t.pause_s * 1e3 for t in here], "ms", 0),
                    spread([t.kept for t in here], "", 3),
                ]
            )
    head = [
        "algorithm",
        "local step",
        "longest before the loss",
        "longest after it",
        "samples after, of those before",
    ]
    return table(head, rows)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args()
    about = circumstances()
    trials = []
    with Lab(HOSTS + 1) as lab, tempfile.TemporaryDirectory() as directory:
        bench = Bench(lab, Path(directory))
        for _ in range(options.repeat):
            for system in SYSTEMS:
                trials.append(bench.trial(system))
                print(trials[-1], flush=True)
    print(report(trials))
    if options.keep:
        keep("lost_in_round", about, report(trials), [asdict(trial) for trial in trials])
    print(in_words(about))


if __name__ == "__main__":
    main()
