"""Injects random faults on lab hosts while a real model trains, and checks that the job reaches its target.

    python -m benchmarks.chaos --events 1000 --seed 7 --keep      # about 100 minutes
    python -m benchmarks.chaos --events 12 --seed 7 --every 2     # under a minute
    python -m benchmarks.chaos --events 12 --seed 7 --schedule    # only say what would happen

Exit code 0 only if the ledger is exact, all replicas end equal, the loss is at its target and nothing is left behind.
Every wait has a deadline. Needs root (network namespaces), etcd, and an otherwise idle machine for its figures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import chaos_leaks, result_file
from benchmarks.chaos_account import Cost, Happened, by_kind, costs, goodput, percentile
from benchmarks.chaos_injection import Injection
from benchmarks.chaos_job import JOB_ID, SAMPLES, ChaosError, ChaosJob, Node
from benchmarks.chaos_rest import why_unrest
from benchmarks.chaos_schedule import Event, Hit, Kind, hit, schedule
from tests.lab import ledger, namespaces
from tests.lab.etcd import EtcdCluster
from tests.lab.namespaces import LabError
from tests.lab.network import Lab

HOSTS = 4
LOSS_TARGET = 0.15  # chance is 0.69; without faults it ends at 0.03
START_DEADLINE_S = 60.0
RECOVERY_DEADLINE_S = 40.0
END_DEADLINE_S = 120.0
GONE_DEADLINE_S = 15.0  # sockets and leases of the last hosts killed
FRESH_STEPS = 5  # so many after a window show that the job goes on


@dataclass(slots=True)
class ChaosOutcome:
    """What a run showed. violations: empty only if all promises were kept."""

    seed: int
    events: int
    done: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    goodput: float | None = None
    wall_s: float = 0.0
    steps: int = 0
    steps_by_world: dict[int, int] = field(default_factory=dict)
    usual_step_s: float = 0.0
    generations: int = 0
    epochs: int = 0
    loss: float | None = None


class Chaos:
    """One run: acts the schedule out and waits, in bounds, until the job goes on."""

    def __init__(
        self, job: ChaosJob, etcd: EtcdCluster, injection: Injection, say: Callable[[str], None]
    ) -> None:
        self._job = job
        self._etcd = etcd
        self._injection = injection
        self._say = say
        self._touched: set[int] = set()
        self._began: list[tuple[Event, Hit, float]] = []
        self.begin_s = self.end_s = 0.0
        self.done: list[str] = []

    def run(self, events: Sequence[Event]) -> None:
        """Raises ChaosError when the job does not go on."""
        for host in self._job.hosts:
            self._job.start(host)
        job = self._job
        job.until(
            lambda: any(s.world_size == HOSTS for s in job.ledger.steps.values()),
            START_DEADLINE_S,
            f"a step by {HOSTS} nodes",
        )
        self.begin_s = time.time()
        previous_s = time.monotonic()
        try:
            for event in events:
                if not event.at_once:
                    self._settle()
                self._wait_until(previous_s + event.after_s)
                previous_s = time.monotonic()
                self._act(event)
            self._settle()
            # The job must not end while a node is still on its way to it: one that comes later begins a job anew.
            job.until(
                lambda: job.world_size == job.running_count,
                START_DEADLINE_S,
                "a step by all nodes that run",
            )
        finally:
            self.end_s = time.time()

    def _act(self, event: Event) -> None:
        what = hit(event, self._job.states(self._touched))
        if what is None:
            self.done.append(f"{event}: nothing could be done")
            self._say(self.done[-1])
            return
        if what.host is not None:
            self._touched.add(what.host)
        self._began.append((event, what, time.time()))
        where = "" if what.host is None else f" on h{what.host}"
        instead = f" (instead of {what.reason})" if what.reason else ""
        self.done.append(f"{event} -> {what.kind.value}{where}{instead}, step {self._job.ledger.newest_step}")
        self._say(self.done[-1])
        self._injection.begin(event, what)

    def _wait_until(self, monotonic_s: float) -> None:
        """Events have times of their own; meanwhile what lasts comes to its end."""
        while True:
            self._injection.end_due()
            self._job.look_at_ends()
            due_s = min(monotonic_s, self._injection.next_due_s or monotonic_s)
            if (left_s := due_s - time.monotonic()) > 0:
                time.sleep(left_s)
            elif due_s == monotonic_s:
                return

    def _settle(self) -> None:
        """Wait until all lasting faults and all nodes due to end have ended, and the job trains. Raises ChaosError."""
        while (due_s := self._injection.next_due_s) is not None:
            self._wait_until(due_s)
            self._injection.end_due()
        job = self._job
        job.until(
            lambda: not any(n.codes and n.process.is_running for n in job.nodes.values()),
            RECOVERY_DEADLINE_S,
            "the end of nodes that were told to leave",
        )
        self._await_rest()
        self._touched.clear()

    def _await_rest(self) -> None:
        """Steps are committed, and from some of them to the next the membership is at rest. Raises ChaosError."""
        job, end_s, resting = self._job, time.monotonic() + RECOVERY_DEADLINE_S, 0
        while resting < 2:
            job.await_steps(FRESH_STEPS, time.time(), RECOVERY_DEADLINE_S)
            why = why_unrest(self._etcd, JOB_ID, job.generation)
            if why and time.monotonic() >= end_s:
                raise ChaosError(f"membership at rest: not within {RECOVERY_DEADLINE_S:g} s: {why}")
            resting = 0 if why else resting + 1

    def happened(self) -> list[Happened]:
        """Every event that was acted out, with its window."""
        ends = [begin_s for _, _, begin_s in self._began[1:]] + [self.end_s]
        return [
            Happened(
                kind=what.kind.value,
                begin_s=begin_s,
                until_s=until_s,
                at_once=event.at_once,
                is_leave=what.kind is Kind.NODE_LEAVES,
                is_join=what.kind is Kind.NODE_JOINS,
                joined_s=self._joined_s(self._injection.joins.get(event.number)),
            )
            for (event, what, begin_s), until_s in zip(self._began, ends, strict=True)
        ]

    def _joined_s(self, node: Node | None) -> float | None:
        if node is None:
            return None
        after = [n.begin_s for n in self._job.started if n.host is node.host and n.begin_s > node.begin_s]
        return self._job.first_step_of(node, min(after, default=float("inf")))


def run(
    events: int,
    seed: int,
    every_s: float,
    directory: Path,
    say: Callable[[str], None],
    script: Sequence[str] = (),
) -> ChaosOutcome:
    """One run in `directory`, which is kept for its logs. script: see ChaosJob."""
    outcome = ChaosOutcome(seed, events)
    with Lab(HOSTS + 1, directory) as lab:
        etcd = lab.etcd(lab.hosts[HOSTS], members=3)
        job = ChaosJob(lab, lab.hosts[:HOSTS], etcd.endpoints, script)
        injection = Injection(job, etcd)
        chaos = Chaos(job, etcd, injection, say)
        try:
            chaos.run(schedule(seed, events, every_s))
            job.finish(END_DEADLINE_S)
        except (ChaosError, LabError, AssertionError) as error:
            outcome.violations.append(str(error))
        outcome.done = chaos.done
        outcome.violations += job.violations
        _measure(outcome, job, chaos)
        if not outcome.violations:
            _check(outcome, job)
            outcome.violations += _left(job, lambda: chaos_leaks.of_store(etcd, JOB_ID))
    return outcome


def _measure(outcome: ChaosOutcome, job: ChaosJob, chaos: Chaos) -> None:
    steps = job.ledger.in_order
    outcome.steps = len(steps)
    outcome.generations = len({s.generation for s in steps})
    outcome.steps_by_world = dict(sorted(Counter(s.world_size for s in steps).items()))
    outcome.wall_s = chaos.end_s - chaos.begin_s
    if chaos.begin_s and outcome.wall_s > 0:
        # later ones do not take their time any more
        inside = [s for s in steps if chaos.begin_s <= s.time_s <= chaos.end_s]
        outcome.goodput = goodput(inside, chaos.begin_s, chaos.end_s)
        outcome.costs = costs(inside, chaos.happened())
        gaps = [b.time_s - a.time_s for a, b in pairwise(inside)]
        outcome.usual_step_s = statistics.median(gaps) if gaps else 0.0


def _check(outcome: ChaosOutcome, job: ChaosJob) -> None:
    """The promises, once the job has ended: one exact history, equal replicas, the target."""
    ends: list[dict[str, Any]] = [
        json.loads(p.read_text()) for p in sorted((job.out / "ends").glob("*.json"))
    ]
    violations = outcome.violations
    if not ends:
        violations.append("no worker reached the end of its script")
        return
    epochs = {end["epochs"] for end in ends}
    if len(epochs) > 1:
        violations.append(f"workers ended after different epochs: {sorted(epochs)}")
    outcome.epochs = max(epochs)
    found = ledger.read(job.records)
    violations += [f"ledger: {what}" for what in found.check(SAMPLES, outcome.epochs)]
    if found.torn:
        violations.append(f"ledger: {found.torn} torn lines")
    last_world = found.lines[-1].world_size
    if len(ends) != last_world:
        violations.append(f"{len(ends)} workers reached the end, {last_world} committed the last step")
    for what in ends[0]["digests"]:
        different = {end["digests"][what]: end["worker"] for end in ends}
        if len(different) > 1:
            violations.append(f"replicas differ in {what}: {sorted(different.values())}")
    for end in ends:
        if end["steps"] != found.steps:
            violations.append(f"{end['worker']} counts {end['steps']} steps, the ledger {found.steps}")
    outcome.loss = max(end["loss"] for end in ends)
    if not outcome.loss <= LOSS_TARGET:
        violations.append(f"loss {outcome.loss:.4f}, target {LOSS_TARGET}")


def _left(job: ChaosJob, of_store: Callable[[], list[str]]) -> list[str]:
    """What is left behind once the kernel and etcd have had their time."""
    end_s = time.monotonic() + GONE_DEADLINE_S
    while True:
        found = [*chaos_leaks.of_processes(job.hosts), *chaos_leaks.of_sockets(job.hosts), *of_store()]
        for host in job.hosts:
            found += chaos_leaks.of_files(job.temporary_directory(host))
        if not found or time.monotonic() >= end_s:
            return found
        time.sleep(0.2)


def in_words(outcome: ChaosOutcome) -> str:
    rows = []
    for kind, found in sorted(by_kind(outcome.costs).items(), key=lambda item: -len(item[1])):
        recoveries = [c.recovery_s for c in found if c.recovery_s is not None]
        pauses = [c.pause_s for c in found]
        rows.append([kind, str(len(found)), *_middle_and_p99(recoveries), *_middle_and_p99(pauses)])
    worlds = ", ".join(f"{size}: {count}" for size, count in outcome.steps_by_world.items())
    share = "-" if outcome.goodput is None else f"{100 * outcome.goodput:.1f} %"
    loss = "-" if outcome.loss is None else f"{outcome.loss:.4f}"
    verdict = "all promises kept" if not outcome.violations else "PROMISES BROKEN"
    head = ["event", "times", "recovery", "p99", "longest pause", "p99"]
    return "\n".join(
        [
            f"Seed {outcome.seed}, {outcome.events} events in {outcome.wall_s:.0f} s: {verdict}.",
            *(f"- {what}" for what in outcome.violations),
            "",
            f"Goodput {share}. {outcome.steps} steps ({outcome.epochs} epochs) in {outcome.generations} generations, "
            f"usually {1000 * outcome.usual_step_s:.0f} ms; steps by world size: {worlds}. Loss {loss} "
            f"(target {LOSS_TARGET}).",
            "",
            result_file.table(head, rows),
            "",
            "Goodput: useful time over wall time, from the first step of all nodes to the last event's end; useful is "
            "of each step the shorter of its gap to the step before and the median gap at this world size. "
            "Recovery (median): event to the first committed step of a later generation with fewer workers before "
            "the next event, '-' if no worker had to be left out; of a leave, of any later generation; of a join, "
            "command to the newcomer's first committed step. Pause (median): the longest gap between two steps "
            "after the event, less the usual gap; newcomers' imports on the machine's few cores are in it.",
        ]
    )


def _middle_and_p99(values: Sequence[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    return f"{statistics.median(values):.2f} s", f"{percentile(values, 0.99):.2f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two events on average")
    parser.add_argument("--script", default="", help="further arguments of chaos_train.py")
    parser.add_argument("--schedule", action="store_true", help="print the schedule and do nothing")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--logs", type=Path, help="directory that gets the run's logs")
    args = parser.parse_args(arguments)
    if args.schedule:
        print("\n".join(map(str, schedule(args.seed, args.events, args.every))))
        return 0
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    about = result_file.circumstances()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    directory = Path(tempfile.mkdtemp(prefix="bagua-chaos-"))
    logs = (args.logs or Path(tempfile.gettempdir())) / f"{directory.name}-logs"
    violated = True
    try:
        outcome = run(args.events, args.seed, args.every, directory, say, shlex.split(args.script))
        violated = bool(outcome.violations)
    finally:
        if violated or args.logs is not None:  # a violation after an hour must not lose its history
            shutil.copytree(directory, logs, ignore=shutil.ignore_patterns("etcd-*", "tmp-*"))
            say(f"logs: {logs}")
        shutil.rmtree(directory, ignore_errors=True)
    words = in_words(outcome)
    print(words)
    if args.keep:
        for path in result_file.keep("chaos", about, words, asdict(outcome)):
            print(f"kept: {path.relative_to(result_file.ROOT)}")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
