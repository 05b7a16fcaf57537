"""Measures what a deterministic job costs, and compares the bits of its results.

    python -m benchmarks.deterministic --keep

Throughput: the character model on two lab hosts with a worker each, once as a deterministic job and once as a normal
one. Both jobs run at the same time and take turns, a block of steps each, so that both see the same machine. Digests:
three models, trained by 1, 2, 3 and 4 workers and by a job with a drawn sequence of joins, leaves and kills. --seed
repeats a sequence. Beside the throughput is what plain torch loses to batches of a shard's size. Needs root (network
namespaces).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.deterministic_digests import MODELS, Digests, digests_of
from benchmarks.deterministic_parts import throughput_in_parts
from benchmarks.worker_environment import worker_environment
from tests.lab import namespaces
from tests.lab.network import Lab
from tests.lab.process import LabProcess

HOSTS, SHARDS = 2, 8
BLOCK_DEADLINE_S, END_DEADLINE_S = 120.0, 60.0
WARM_UP_BLOCKS = 1
MODES = {"normal": (), "deterministic": ("--deterministic", "--virtual-shards", str(SHARDS))}


@dataclass(frozen=True, slots=True)
class Setting:
    """samples: of a shard. steps: in a block."""

    samples: int
    rate: str | None
    steps: int

    @property
    def batch(self) -> int:
        return self.samples * SHARDS


SETTINGS = (
    Setting(2, None, 24),
    Setting(4, None, 16),
    Setting(4, "1gbit", 16),
    Setting(8, None, 10),
    Setting(8, "1gbit", 10),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds a step, of each block in turn. normal_cpu_s, deterministic_cpu_s: of rank 0's processor. plain_parts: the
    throughput of plain torch in batches of a shard, over that in one batch of a worker."""

    setting: Setting
    normal_s: tuple[float, ...]
    deterministic_s: tuple[float, ...]
    normal_cpu_s: tuple[float, ...]
    deterministic_cpu_s: tuple[float, ...]
    plain_parts: float

    @property
    def ratios(self) -> list[float]:
        """Throughput of each deterministic block over that of the normal one before it."""
        return [n / d for n, d in zip(self.normal_s, self.deterministic_s, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """The same of the processor's time, which depends less on what else the machine does."""
        return [n / d for n, d in zip(self.normal_cpu_s, self.deterministic_cpu_s, strict=True)]


class Bench:
    def __init__(self, lab: Lab, blocks: int) -> None:
        self._lab = lab
        self._blocks = blocks + WARM_UP_BLOCKS
        self._endpoint = lab.etcd(lab.hosts[-1]).endpoints
        self._jobs = 0

    def compare(self, setting: Setting) -> Comparison:
        self._lab.shape(setting.rate)
        jobs = {mode: self._start(mode, setting) for mode in MODES}
        found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for block in range(self._blocks):
            for mode, (out, processes) in jobs.items():
                (out / f"go-{block}").touch()
                wall_s, cpu_s = _await(out / f"done-{block}", processes)
                found[mode].append((wall_s / setting.steps, cpu_s / setting.steps))
        for _, processes in jobs.values():
            for process in processes:
                if process.wait(END_DEADLINE_S) != 0:
                    raise RuntimeError(f"{process} failed\n{process.tail()}")
        self._lab.shape(None)
        clocks = [tuple(zip(*found[mode][WARM_UP_BLOCKS:], strict=True)) for mode in MODES]
        (normal_s, normal_cpu_s), (deterministic_s, deterministic_cpu_s) = clocks
        parts = throughput_in_parts(setting.samples, SHARDS // HOSTS, HOSTS)
        return Comparison(setting, normal_s, deterministic_s, normal_cpu_s, deterministic_cpu_s, parts)

    def _start(self, mode: str, setting: Setting) -> tuple[Path, list[LabProcess]]:
        self._jobs += 1
        out = self._lab.directory / f"deterministic-{self._jobs}"
        out.mkdir()
        words = [
            sys.executable,
            "-m",
            "bagua_launch",
            "--nnodes",
            str(HOSTS),
            "--rdzv-endpoint",
            self._endpoint,
        ]
        words += ["--rdzv-id", out.name, *MODES[mode], "--digest-every", "0"]
        script = [str(Path(__file__).with_name("deterministic_worker.py")), "--out", str(out)]
        script += [
            "--batch",
            str(setting.batch),
            "--steps",
            str(setting.steps),
            "--blocks",
            str(self._blocks),
        ]
        env = worker_environment(GLOO_SOCKET_IFNAME="eth0")
        processes = [
            host.run(
                [*words, "--local-addr", host.address, *script], env=env, output=out / f"{host.name}.log"
            )
            for host in self._lab.hosts[:HOSTS]
        ]
        return out, processes


def _await(path: Path, processes: Sequence[LabProcess]) -> tuple[float, float]:
    """Seconds of a block, and of the processor of rank 0."""
    deadline_s = time.monotonic() + BLOCK_DEADLINE_S
    while not path.exists():
        failed = next((p for p in processes if not p.is_running and not path.exists()), None)
        if failed is not None or time.monotonic() > deadline_s:
            raise RuntimeError(
                f"no {path.name} of {failed or processes[0]}\n{(failed or processes[0]).tail()}"
            )
        time.sleep(0.005)
    wall_s, cpu_s = map(float, path.read_text().split())
    return wall_s, cpu_s


def in_words(comparisons: Sequence[Comparison], digests: Sequence[Digests]) -> str:
    parts = []
    if comparisons:
        rows = [
            [
                str(c.setting.samples),
                str(c.setting.batch),
                c.setting.rate or "unshaped",
                result_file.spread([t * 1e3 for t in c.normal_s], "ms", 1),
                result_file.spread([t * 1e3 for t in c.deterministic_s], "ms", 1),
                result_file.spread(c.ratios, "", 3),
                f"{statistics.median(c.cpu_ratios):.3f}",
                f"{c.plain_parts:.3f}",
            ]
            for c in comparisons
        ]
        head = [
            "samples a shard",
            "batch",
            "link",
            "normal step",
            "deterministic step",
            "throughput, of normal",
            "by CPU time",
            "plain torch in batches of a shard, by CPU time",
        ]
        parts += [f"Character model, {HOSTS} hosts, {SHARDS} virtual shards, blocks in turn:", ""]
        parts += [result_file.table(head, rows), ""]
    if digests:
        rows = [
            [d.model, str(d.steps), *(found[:12] for found in d.by_workers), d.with_faults[:12], d.faults]
            for d in digests
        ]
        head = ["model", "steps", "1 worker", "2", "3", "4", "with faults", "faults (workers after each)"]
        parts += ["Digests of parameters, buffers, optimizer state and learning rate at the end:", ""]
        parts += [result_file.table(head, rows), ""]
    return "\n".join(parts)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--blocks", type=int, default=7, help="of each mode")
    parser.add_argument("--part", choices=("throughput", "digests"), action="append")
    parser.add_argument("--model", choices=MODELS, action="append", help="of the digests")
    parser.add_argument(
        "--seed", type=int, help="of the faults of the digests; else one is drawn, and printed"
    )
    parser.add_argument("--samples", type=int, choices=sorted({s.samples for s in SETTINGS}), action="append")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args()
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    parts = args.part or ["throughput", "digests"]
    about = result_file.circumstances()
    comparisons: list[Comparison] = []
    digests: list[Digests] = []
    if "throughput" in parts:
        with Lab(HOSTS + 1) as lab:
            bench = Bench(lab, args.blocks)
            for setting in SETTINGS:
                if not args.samples or setting.samples in args.samples:
                    comparisons.append(bench.compare(setting))
                    ratio = statistics.median(comparisons[-1].ratios)
                    print(f"{setting}: {ratio:.3f} of normal", file=sys.stderr, flush=True)
    if "digests" in parts:
        seed = random.randrange(1_000_000) if args.seed is None else args.seed
        with tempfile.TemporaryDirectory() as directory:
            for model in args.model or MODELS:
                digests.append(digests_of(model, Path(directory), seed))
                print(f"{digests[-1]}", file=sys.stderr, flush=True)
    words = in_words(comparisons, digests)
    print(words)
    if args.keep:
        values: dict[str, Any] = {
            "throughput": [asdict(c) for c in comparisons],
            "digests": [asdict(d) for d in digests],
        }
        for path in result_file.keep("deterministic", about, words, values):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0 if all(d.are_equal for d in digests) else 1


if __name__ == "__main__":
    sys.exit(main())
