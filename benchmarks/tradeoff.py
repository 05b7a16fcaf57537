"""Measures the speed of each algorithm on slow networks, beside torch's DDP in the same run.

    python -m benchmarks.tradeoff --delay-ms 0,5 --keep
    python -m benchmarks.tradeoff --links 100mbit --only ddp --only bagua --algorithm bytegrad --repeat 1
    python -m benchmarks.tradeoff --links 100mbit --only alone --only bagua --algorithm diloco_rounds_int4

Four hosts of the lab with a worker each, a model of 17 M parameters, links at 100 Mbit/s, 1 and 10 Gbit/s; with a
delay too, by a relay (benchmarks/relay.py). One job a system, condition and repeat; systems in turn. Needs root
(network namespaces).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from benchmarks import result_file, tradeoff_plots, tradeoff_table
from benchmarks.relay import Relay
from benchmarks.tradeoff_systems import (
    HOSTS,
    LINKS,
    SYSTEMS,
    WITHOUT_BAGUA,
    Condition,
    Job,
    Run,
    RunFailed,
    System,
    measure,
)
from benchmarks.tradeoff_window import Enough
from tests.lab import namespaces
from tests.lab.network import Lab

WIDTH = 2048  # of the four layers: 17 M parameters
BATCH = 16  # of a worker
REPEATS = 2
ENOUGH = Enough(warm_up=0, steps=6, window_s=12.0, most_s=100.0)  # the warm-up is the system's


class Bench:
    """The runs so far, and what there is to say beside them."""

    def __init__(self, lab: Lab, enough: Enough, width: int, batch: int) -> None:
        self._lab = lab
        self._endpoints = lab.etcd(lab.hosts[HOSTS]).endpoints
        self._enough = enough
        self._width = width
        self._batch = batch
        self._jobs = 0
        self.runs: list[Run] = []
        self.failures: list[str] = []
        self.notes: list[str] = []

    def condition(self, condition: Condition, systems: Sequence[System], repeats: int) -> None:
        """Every system `repeats` times, in turn, each round beginning with another one."""
        with self._network(condition):
            for repeat in range(1, repeats + 1):
                turn = (repeat - 1) % len(systems)
                for system in [*systems[turn:], *systems[:turn]]:
                    self._measure(Job(system, condition, repeat))

    def _measure(self, job: Job) -> None:
        self._jobs += 1
        what = f"{job.condition}, round {job.repeat}, {job.system.name}"
        began_s = time.monotonic()
        try:
            run = measure(self._lab, self._endpoints, job, self._enough, self._width, self._batch, self._jobs)
        except RunFailed as error:
            self.failures.append(f"{what}: {str(error).splitlines()[0]}")
            print(f"{what}: {error}", file=sys.stderr, flush=True)
            return
        self.runs.append(run)
        shown = tradeoff_table.row([run])
        took_s = time.monotonic() - began_s
        print(f"{what}: {shown.spread} ({took_s:.0f} s in all)", file=sys.stderr, flush=True)

    @contextmanager
    def _network(self, condition: Condition) -> Iterator[None]:
        self._lab.shape(condition.rate)
        if not condition.delay_ms:
            yield
        else:
            relay, began_s = Relay(self._lab, condition.delay_ms / 1000), time.monotonic()
            try:
                yield
            finally:
                account, took_s = relay.stop(), time.monotonic() - began_s
                self.notes.append(
                    f"{condition}: the relay forwarded {account.forwarded} frames, {account.late} of them more than "
                    f"1 ms late (at most {account.latest_s * 1e3:.1f} ms), lost {account.dropped}, and took "
                    f"{account.cpu_s / took_s:.0%} of a core from the workers"
                )
        self._lab.shape(None)


def chosen_systems(only: Sequence[str], algorithms: Sequence[str]) -> list[System]:
    """Those that are asked for; all of them if nothing is."""
    return [
        system
        for name, system in SYSTEMS.items()
        if not only or ("bagua" if system.is_bagua else name) in only
        if not system.is_bagua or not algorithms or name in algorithms
    ]


def _conditions(links: str, delays_ms: str) -> list[Condition]:
    try:
        return [Condition(rate, float(delay)) for delay in delays_ms.split(",") for rate in links.split(",")]
    except ValueError as error:
        raise SystemExit(f"--delay-ms {delays_ms}: {error}; give numbers, as 0,5") from error


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", choices=("bagua", *WITHOUT_BAGUA), action="append", default=[])
    bagua = [name for name, system in SYSTEMS.items() if system.is_bagua]
    parser.add_argument("--algorithm", choices=bagua, action="append", default=[], help="of Bagua's")
    parser.add_argument(
        "--links", default=",".join(LINKS), help="rates as tc takes them; default %(default)s"
    )
    parser.add_argument("--delay-ms", default="0", help="each way, several as 0,5; default %(default)s")
    parser.add_argument("--steps", type=int, default=ENOUGH.steps, help="at least, of each run")
    parser.add_argument("--window-s", type=float, default=ENOUGH.window_s, help="at least, of each run")
    parser.add_argument("--repeat", type=int, default=REPEATS, help="runs of each system and condition")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model's layers")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a worker in a step")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    about = result_file.circumstances()
    systems = chosen_systems(args.only, args.algorithm)
    enough = Enough(0, args.steps, args.window_s, max(ENOUGH.most_s, args.window_s))
    with Lab(HOSTS + 1) as lab:
        bench = Bench(lab, enough, args.width, args.batch)
        for condition in _conditions(args.links, args.delay_ms):
            bench.condition(condition, systems, args.repeat)
    if not bench.runs:
        print("\n".join(["no run succeeded", *bench.failures]), file=sys.stderr)
        return 1
    found = tradeoff_table.rows(bench.runs)
    notes = [*bench.notes, *(f"failed: {failure}" for failure in bench.failures)]
    words = "\n".join([_about(bench.runs[0]), "", tradeoff_table.in_words(found), *(f"- {n}" for n in notes)])
    print(words)
    if args.keep:
        values = {"rows": [asdict(r) for r in found], "runs": [asdict(r) for r in bench.runs], "notes": notes}
        part = result_file.part_of([s.name for s in systems], SYSTEMS)
        part += result_file.part_of(args.links.split(","), LINKS)
        part += [f"{delay}ms" for delay in args.delay_ms.split(",") if args.delay_ms != "0"]
        figures = tradeoff_plots.figures(found, bench.runs)
        for path in result_file.keep("tradeoff", about, words, values, part, figures):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 1 if bench.failures else 0


def _about(run: Run) -> str:
    return (
        f"{HOSTS} hosts, one worker each, {run.parameters / 1e6:.1f} M parameters, global batch {run.global_batch}, "
        "fp32 on CPUs over Gloo, one torch thread a worker. A step: median (least to most, number of steps) of rank "
        "0's whole iterations after the warm-up; for async, local_sgd and DiLoCo the mean over whole rounds, as most "
        "steps are cheap and some are not. Busy: the median of these steps over the mean. x DDP: DDP's step over this "
        "one's, in the same run. Utilisation: samples a second of all workers over the whole window, over those of the "
        "same workers that train at the same time without any communication (alone), in the same round of the run; the "
        "mean (least to most). Windows contain whole rounds of local SGD and DiLoCo. Sent: by a host's interface for a "
        "global batch, the agent's traffic included. QAdam is measured after its warm-up."
    )


if __name__ == "__main__":
    sys.exit(main())
