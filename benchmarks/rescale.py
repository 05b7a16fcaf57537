"""Measures membership changes of Bagua, torchrun and torchft on the lab's hosts.

    python -m benchmarks.rescale --repeat 5 --keep

One trial is one job of one system: three hosts start cold, one is killed, it comes back as a new one, and it is
cut off silently. Trials of the systems alternate. Every wait has a deadline; a missed deadline is reported. Needs
root (network namespaces).
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import rescale_plot, result_file
from benchmarks.rivals.install_torchft import NotInstallable
from benchmarks.rivals.systems import ALL, LEAST_HOSTS, MOST_HOSTS, System
from benchmarks.step_log import Account, StepLogs, account, committed, first_together, gaps_s, usual_step_s
from benchmarks.worker_environment import compile_packages
from tests.lab import namespaces
from tests.lab.namespaces import LabError
from tests.lab.network import Host, Lab

COLD_START_DEADLINE_S = 60.0
CHANGE_DEADLINE_S = 30.0
RESTART_DEADLINE_S = 120.0  # for a system that restarts every process
QUIET_S = 2.0  # between two changes, to see the usual step time
AROUND_SWITCH_S = 0.5
LOOK_EVERY_S = 0.02


class NotWithin(RuntimeError):
    """Something that was to be measured did not happen before its deadline."""


@dataclass(slots=True)
class Trial:
    """What one job showed, in seconds; None: not measured, `notes` says why."""

    system: str
    cold_start_s: float | None = None
    usual_step_s: float | None = None
    kill_s: float | None = None
    join_s: float | None = None
    join_pause_s: float | None = None
    switch_pause_s: float | None = None
    cut_s: float | None = None
    leader_kill_s: float | None = None
    kill_account: Account | None = None
    account: Account | None = None
    notes: list[str] = field(default_factory=list)


MEASURES: tuple[tuple[str, str, str], ...] = (
    ("cold_start_s", "cold start", "s"),
    ("kill_s", "host killed", "s"),
    ("join_s", "host joins", "s"),
    ("join_pause_s", "survivors' pause", "s"),
    ("cut_s", "link cut", "s"),
    ("leader_kill_s", "leader's host killed", "s"),
)


class Run:
    """One job under observation."""

    def __init__(self, lab: Lab, system: System) -> None:
        self.system = system
        self.hosts = lab.hosts[:MOST_HOSTS]
        self.logs = StepLogs(system.steps_directory)
        self.trial = Trial(system.name)
        self._deadline_s = CHANGE_DEADLINE_S if system.recovers_from_silence else RESTART_DEADLINE_S

    def await_time(self, what: str, deadline_s: float, find: Callable[[], float | None]) -> float:
        """The time that `find` reads off the logs. Raises NotWithin."""
        end_s = time.monotonic() + deadline_s
        while True:
            self.logs.read_on()
            found = find()
            if found is not None:
                return found
            if time.monotonic() >= end_s:
                raise NotWithin(f"{what}: not within {deadline_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def quiet(self, world_size: int) -> tuple[float, float]:
        """Let the job run undisturbed; the span of time."""
        begin_s = time.time()

        def stepped() -> float | None:
            after = committed(self.logs.steps, world_size, begin_s + QUIET_S)
            return after[0].time_s if after else None

        return begin_s, self.await_time("undisturbed steps", CHANGE_DEADLINE_S, stepped)

    def survivors_step(self, after_s: float) -> float | None:
        """The next step that does not count on the lost host."""
        after = committed(self.logs.steps, LEAST_HOSTS, after_s)
        return after[0].time_s if after else None

    def cold_start(self) -> None:
        begin_s = time.time()
        for host in self.hosts:
            self.system.start(host)
        first_s = self.await_time(
            "three hosts' first step",
            COLD_START_DEADLINE_S,
            lambda: first_together(self.logs.steps, MOST_HOSTS, begin_s),
        )
        self.trial.cold_start_s = first_s - begin_s
        quiet = self.quiet(MOST_HOSTS)
        self.trial.usual_step_s = statistics.median(
            usual_step_s(self.logs.steps, host.name, *quiet) for host in self.hosts
        )

    def kill(self, host: Host) -> float:
        begin_s = time.time()
        host.kill_all()
        next_s = self.await_time(
            f"next step after {host.name} was killed", self._deadline_s, lambda: self.survivors_step(begin_s)
        )
        return next_s - begin_s

    def join(self, host: Host) -> None:
        before = self.quiet(LEAST_HOSTS)
        begin_s = time.time()
        self.system.start(host)
        together_s = self.await_time(
            f"first step with {host.name}",
            self._deadline_s,
            lambda: first_together(self.logs.steps, MOST_HOSTS, begin_s),
        )
        self.trial.join_s = together_s - begin_s
        self.quiet(MOST_HOSTS)
        pauses, at_switch = [], []
        for survivor in self.hosts:
            if survivor is host:
                continue
            usual_s = usual_step_s(self.logs.steps, survivor.name, *before)
            around = gaps_s(self.logs.steps, survivor.name, begin_s, together_s + AROUND_SWITCH_S)
            pauses += [length - usual_s for _, length in around]
            at_switch += [
                length - usual_s for end_s, length in around if abs(end_s - together_s) <= AROUND_SWITCH_S
            ]
        if len(pauses) > 1:
            self.trial.join_pause_s = max(0.0, *pauses)
            self.trial.switch_pause_s = max(0.0, max(at_switch, default=0.0))

    def cut(self, host: Host) -> None:
        begin_s = time.time()
        host.cut()
        next_s = self.await_time(
            f"next step after {host.name} was cut off",
            CHANGE_DEADLINE_S,
            lambda: self.survivors_step(begin_s),
        )
        self.trial.cut_s = next_s - begin_s


@contextmanager
def _job(name: str, keep_logs: Path | None) -> Iterator[Run]:
    directory = Path(tempfile.mkdtemp(prefix=f"bagua-rescale-{name}-"))
    try:
        with Lab(MOST_HOSTS + 1, directory) as lab:
            system = ALL[name](lab)
            system.prepare()
            yield Run(lab, system)
        if keep_logs is not None:
            shutil.copytree(directory, keep_logs / directory.name, ignore=shutil.ignore_patterns("etcd-*"))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def one_trial(name: str, keep_logs: Path | None) -> Trial:
    """All measurements of one job; a failed one leaves the rest undone, with a note."""
    with _job(name, keep_logs) as run:
        trial = run.trial
        lost = run.hosts[-1]
        try:
            run.cold_start()
            trial.kill_s = run.kill(lost)
            run.quiet(LEAST_HOSTS)
            trial.kill_account = account(run.logs.read_on(), run.system.fixed_global_batch)
            run.join(lost)
            if run.system.recovers_from_silence:
                run.cut(lost)
                run.quiet(LEAST_HOSTS)
            else:
                trial.notes.append("link cut: not measured, the collective's timeout is 30 min by default")
        except NotWithin as error:
            trial.notes.append(str(error))
        trial.account = account(run.logs.read_on(), run.system.fixed_global_batch)
    return trial


def leader_trial(keep_logs: Path | None) -> Trial:
    """Bagua once more, with the host killed whose agent leads."""
    with _job("bagua", keep_logs) as run:
        trial = run.trial
        try:
            run.cold_start()
            leading = next(
                (h for h in run.hosts for p in h.processes if "this node leads" in p.text()), run.hosts[0]
            )
            trial.leader_kill_s = run.kill(leading)
        except NotWithin as error:
            trial.notes.append(str(error))
        trial.cold_start_s = None  # counted in the other trials
    return trial


def in_words(trials: Sequence[Trial], notes: Sequence[str]) -> str:
    head = ["system", *(title for _, title, _ in MEASURES), "steps undone", "samples lost, twice"]
    rows = []
    for name in dict.fromkeys(t.system for t in trials):
        own = [t for t in trials if t.system == name]
        cells = [name]
        for attribute, _, unit in MEASURES:
            values = [v for t in own if (v := getattr(t, attribute)) is not None]
            cells.append(result_file.spread(values, unit, 3 if "pause" in attribute else 2))
        kills = [t.kill_account for t in own if t.kill_account is not None]
        ends = [t.account for t in own if t.account is not None]
        cells.append(", ".join(str(a.steps_undone) for a in kills) or "-")
        cells.append(", ".join(f"{a.samples_lost}+{a.samples_twice}" for a in ends) or "-")
        rows.append(cells)
    said = Counter(f"- {t.system}: {note}" for t in trials for note in t.notes)
    return "\n".join(
        [
            result_file.table(head, rows),
            "",
            "Median (least to most, number of trials). Cold start, join: command to the first committed step "
            "that used samples of all three hosts. Killed, cut: to the next step without that host. Pause: "
            "the survivors' longest gap between two steps from the command to half a second after, less "
            "their usual one. Steps undone by the kill, one number a trial; samples lost and twice by the "
            "whole trial.",
            "",
            *notes,
            *(f"{note} ({count} of the trials)" for note, count in said.items()),
        ]
    )


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=sorted(ALL), action="append", help="this system (may come again)")
    parser.add_argument("--no-leader", action="store_true", help="leave out killing the leader's host")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--logs", type=Path, help="directory that gets every trial's logs")
    args = parser.parse_args()
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    compile_packages()
    about = result_file.circumstances()
    names = [n for n in ALL if not args.only or n in args.only]
    skipped: dict[str, str] = {}
    trials: list[Trial] = []
    for round_number, name in itertools.product(range(1, args.repeat + 1), names):
        if name in skipped:
            continue
        try:
            found = [one_trial(name, args.logs)]
            if name == "bagua" and not args.no_leader:
                found.append(leader_trial(args.logs))
        except NotInstallable as error:
            skipped[name] = f"- {name}: not measured: {error}"
            continue
        except (LabError, AssertionError) as error:  # its infrastructure did not come up: the others go on
            found = [Trial(name, notes=[f"no trial: {error}"])]
        trials += found
        for trial in found:
            print(f"round {round_number}: {_brief(trial)}", file=sys.stderr, flush=True)
    notes = [*skipped.values(), *(f"- {n}: {ALL[n].notes}" for n in names if n not in skipped)]
    words = in_words(trials, notes)
    print(words)
    if args.keep:
        values = [asdict(t) for t in trials]
        figures = {"changes": lambda pyplot: rescale_plot.draw(pyplot, rescale_plot.medians(values))}
        for path in result_file.keep("rescale", about, words, values, figures=figures):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0


def _brief(trial: Trial) -> str:
    values: dict[str, Any] = {k: v for k, v in asdict(trial).items() if isinstance(v, float)}
    shown = " ".join(f"{k.removesuffix('_s')}={v:.3f}" for k, v in values.items())
    accounts = f" kill={trial.kill_account} all={trial.account}" if trial.account else ""
    return f"{trial.system}: {shown}{accounts} {'; '.join(trial.notes)}"


if __name__ == "__main__":
    sys.exit(main())
