"""Injects each fault into a running job of one system, row after row, and computes its cost from the step logs.

After each row the job is brought back to three hosts. What does not happen before its deadline becomes a note, and
ends the job's trial if it can't be mended. Times are the hosts' own; a lab's hosts share one clock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.fault_rows import (
    AGENT_KILLED,
    BELOW_MINIMUM,
    ETCD_AWAY,
    ETCD_MEMBER,
    HOST_SILENT,
    ROWS,
    SCRIPT_RAISES,
    SIGTERM,
    WORKER_HANGS,
    WORKER_KILLED,
    Measured,
    Row,
)
from benchmarks.fault_systems import SYSTEMS, TriggeredBagua, WithTriggers, hang_options
from benchmarks.fault_victims import NoLeaderError, pick
from benchmarks.rescale import LOOK_EVERY_S, NotWithin, Run
from benchmarks.rivals.systems import LEAST_HOSTS, MOST_HOSTS
from benchmarks.step_log import Step, first_together
from benchmarks.step_writers import writers_on
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess

ETCD_AWAY_S = 4.5  # longer than a lease
STANDS_STILL_S = 0.5
END_DEADLINE_S = 40.0


@dataclass(slots=True)
class Trial:
    """What one job of `system` showed; `notes` say what it did not."""

    system: str
    measured: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Faults:
    """Faults on one running job. Every method raises NotWithin when something does not happen in time."""

    def __init__(self, lab: Lab, system: WithTriggers, deadline_s: float) -> None:
        self._lab, self._system = lab, system
        self._run = Run(lab, system)
        self._hosts = self._run.hosts
        self._nodes: dict[Host, LabProcess] = {}
        self._deadline_s = deadline_s

    # -- the job

    def start(self) -> None:
        begin_s = time.time()
        for host in self._hosts:
            self._nodes[host] = self._system.start(host)
        self._together(begin_s)
        self._run.quiet(MOST_HOSTS)

    def _together(self, after_s: float) -> float:
        """The first step after `after_s` with samples of all three hosts."""

        def found() -> float | None:
            return first_together(self._steps, MOST_HOSTS, after_s)

        return self._run.await_time("a step of three hosts", self._deadline_s, found)

    @property
    def _steps(self) -> list[Step]:
        return self._run.logs.steps

    def _come_back(self, host: Host) -> None:
        """The command on `host` again, until all three train."""
        begin_s = time.time()
        self._nodes[host] = self._system.start(host)
        self._together(begin_s)
        self._run.quiet(MOST_HOSTS)

    def _train_on(self) -> None:
        """No worker was lost for good: until all three train again."""
        self._together(time.time())
        self._run.quiet(MOST_HOSTS)

    def _newest(self) -> Step:
        return max(self._run.logs.read_on(), key=lambda s: s.time_s)

    def _next_step(self, what: str, fault_s: float, before: Step) -> float:
        """From `fault_s` to the next committed step that does not count on what was there before."""

        def found() -> float | None:
            later = (
                s.time_s
                for s in self._steps
                if s.time_s > fault_s
                and not s.given_up
                and (s.generation > before.generation or s.world_size < before.world_size)
            )
            return min(later, default=None)

        return self._run.await_time(f"next step after: {what}", self._deadline_s, found) - fault_s

    def _worker(self, host: Host) -> int:
        found = writers_on(host, self._system.steps_directory)
        if not found:
            raise NotWithin(f"{host.name} has no worker")
        return found[-1][0]

    def measure(self, row: Row) -> list[Measured]:
        """The row's fault: on a host that does not lead and then, of Bagua, on the one that does."""
        both = row.of_host and isinstance(self._system, TriggeredBagua)
        return [self.strike(row, of_leader=of_leader) for of_leader in ((False, True) if both else (False,))]

    def strike(self, row: Row, *, of_leader: bool) -> Measured:
        act: Callable[..., Measured] = getattr(self, row.name)
        if not row.of_host:
            return act()
        host = pick(self._hosts, self._leader(), of_leader=of_leader)
        return replace(act(host), of_leader=of_leader)

    def _leader(self) -> Host | None:
        """The host that leads a job of Bagua, waiting for an election; others have none."""
        if not isinstance(self._system, TriggeredBagua):
            return None
        end_s = time.monotonic() + self._deadline_s
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):  # etcd elects a leader of its own
                if (leader := self._system.leading_host(self._hosts)) is not None:
                    return leader
            time.sleep(LOOK_EVERY_S)
        raise NotWithin(f"a leader: not within {self._deadline_s:g} s")

    @property
    def _missed(self) -> int:
        """Steps that workers said did not happen; each says it once, so they are counted over all nodes."""
        return sum(process.text().count("did not happen") for process in self._nodes.values())

    # -- the rows

    def worker_killed(self, host: Host) -> Measured:
        pid, before = self._worker(host), self._newest()
        fault_s = time.time()
        os.kill(pid, signal.SIGKILL)
        value_s = self._next_step("worker killed", fault_s, before)
        self._mend(host, fault_s)
        return Measured(WORKER_KILLED.name, value_s)

    def script_raises(self, host: Host) -> Measured:
        before = self._newest()
        fault_s = self._triggered("raise", host)
        value_s = self._next_step("script raises", fault_s, before)
        self._mend(host, fault_s)
        return Measured(SCRIPT_RAISES.name, value_s)

    def worker_hangs(self, host: Host) -> Measured:
        before = self._newest()
        fault_s = self._triggered("hang", host)
        value_s = self._next_step("worker hangs", fault_s, before)
        self._mend(host, fault_s)
        return Measured(WORKER_HANGS.name, value_s)

    def _triggered(self, what: str, host: Host) -> float:
        said = self._system.trigger(what, host)
        return self._run.await_time(
            f"{host.name} to {what}",
            self._deadline_s,
            lambda: float(said.read_text()) if said.exists() else None,
        )

    def _mend(self, host: Host, fault_s: float) -> None:
        """Start each process again that has no agent to restart its worker."""
        if isinstance(self._system, TriggeredBagua) or self._nodes[host].is_running:
            self._together(fault_s + 0.001)
            self._run.quiet(MOST_HOSTS)
        else:
            self._come_back(host)

    def agent_killed(self, host: Host) -> Measured:
        before = self._newest()
        fault_s = time.time()
        self._nodes[host].kill()
        value_s = self._next_step(AGENT_KILLED.title, fault_s, before)
        self._come_back(host)
        return Measured(AGENT_KILLED.name, value_s)

    def sigterm(self, host: Host) -> Measured:
        before, missed = self._newest(), self._missed
        fault_s = time.time()
        self._nodes[host].send(signal.SIGTERM)
        value_s = self._next_step("SIGTERM", fault_s, before)
        self._nodes[host].wait(END_DEADLINE_S)
        found = Measured(SIGTERM.name, value_s, self._missed - missed)
        self._come_back(host)
        return found

    def host_silent(self, host: Host) -> Measured:
        before = self._newest()
        fault_s = time.time()
        host.cut()
        try:
            value_s = self._next_step("host silent", fault_s, before)
        finally:
            host.heal()
        if isinstance(self._system, TriggeredBagua):
            self._train_on()
        return Measured(HOST_SILENT.name, value_s)

    def etcd_member(self) -> Measured:
        cluster = self._bagua.cluster
        victim = cluster.leader
        missed, begin_s = self._missed, time.time()
        victim.kill()
        value_s = self._largest_gap_s(begin_s, begin_s + ETCD_AWAY_S)
        victim.restart()
        return Measured(ETCD_MEMBER.name, value_s, self._missed - missed)

    def etcd_away(self) -> Measured:
        cluster = self._bagua.cluster
        missed, begin_s = self._missed, time.time()
        cluster.kill()
        self._await_steps_until(begin_s + ETCD_AWAY_S)
        cluster.restart()
        value_s = self._largest_gap_s(begin_s, time.time() + 1.0)
        return Measured(ETCD_AWAY.name, value_s, self._missed - missed)

    @property
    def _bagua(self) -> TriggeredBagua:
        assert isinstance(self._system, TriggeredBagua)
        return self._system

    def _await_steps_until(self, until_s: float) -> None:
        """Until a step was committed after `until_s`."""
        self._run.await_time(
            "training while etcd is away",
            self._deadline_s,
            lambda: next((s.time_s for s in reversed(self._steps) if s.time_s > until_s), None),
        )

    def _largest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Between any two steps of the job in this span, once it is over."""
        self._await_steps_until(end_s)
        times = sorted(
            {s.step: s.time_s for s in reversed(self._steps) if begin_s <= s.time_s <= end_s}.values()
        )
        return max((b - a for a, b in pairwise(times)), default=end_s - begin_s)

    def below_minimum(self, host: Host) -> Measured:
        """`host` and another are killed where two are the least; from the command that starts `host` again to the next
        step."""
        leader = self._leader()
        stays = next(h for h in self._hosts if h is not host and (leader in (None, host) or h is leader))
        lost = [host, *(h for h in self._hosts if h not in (host, stays))]
        for one in lost:
            one.kill_all()
        self._stands_still()
        before = self._newest()
        begin_s = time.time()
        self._nodes[lost[0]] = self._system.start(lost[0])
        later = self._run.await_time(
            "steps after the minimum is there again",
            self._deadline_s,
            lambda: min(
                (s.time_s for s in self._steps if s.time_s > max(begin_s, before.time_s)), default=None
            ),
        )
        self._come_back(lost[1])
        return Measured(BELOW_MINIMUM.name, later - begin_s)

    def _stands_still(self) -> None:
        """Until no step was committed for a while: the fault is there."""

        def still() -> float | None:
            newest_s = self._newest().time_s
            return newest_s if time.time() - newest_s > STANDS_STILL_S else None

        self._run.await_time("the job to stand still", self._deadline_s, still)


# In this order; what a system can't do or has not is missing, and `LEFT_OUT` says why.
PLANS: dict[str, tuple[Row, ...]] = {
    "bagua": (
        WORKER_KILLED,
        SCRIPT_RAISES,
        AGENT_KILLED,
        SIGTERM,
        ETCD_MEMBER,
        ETCD_AWAY,
        HOST_SILENT,
        BELOW_MINIMUM,
        WORKER_HANGS,
    ),
    "torchft": (WORKER_KILLED, SCRIPT_RAISES, SIGTERM, BELOW_MINIMUM, HOST_SILENT),
    "torchrun": (WORKER_KILLED, SCRIPT_RAISES, SIGTERM, BELOW_MINIMUM),
}
LEFT_OUT: dict[str, str] = {
    "bagua": "",
    "torchft": "no agent, leader or etcd; a process that was killed or raised is started again by the benchmark; its "
    "Lighthouse is a single place and is not killed; it has no detection of hangs but its timeouts",
    "torchrun": "a killed agent leaves its workers training on unseen, a silent host lasts until the collective's "
    "timeout of 30 min; its rendezvous host is a single place and is not killed; no etcd",
}
DEADLINES_S = {"bagua": 40.0, "torchft": 60.0, "torchrun": 120.0}


def one_trial(name: str, rows: tuple[str, ...], keep_logs: Path | None) -> Trial:
    """One job of this system with each of `rows` that it can do."""
    trial = Trial(name)
    plan = [row for row in PLANS[name] if row.name in rows]
    if WORKER_HANGS in plan and hang_options() is None:
        plan.remove(WORKER_HANGS)
        trial.notes.append("worker hangs: not measured, this version does not replace hanging workers yet")
    with prepared(name, keep_logs) as (lab, system), failures_noted(trial):
        faults = Faults(lab, system, DEADLINES_S[name])
        faults.start()
        for row in plan:
            trial.measured += faults.measure(row)
    return trial


@contextlib.contextmanager
def failures_noted(trial: Trial) -> Iterator[None]:
    """What does not happen in time, or not as promised, ends the trial with a note."""
    try:
        yield
    except (NotWithin, NoLeaderError, AssertionError) as error:
        trial.notes.append(f"the trial ended: {error}")


@contextlib.contextmanager
def prepared(name: str, keep_logs: Path | None) -> Iterator[tuple[Lab, WithTriggers]]:
    """A lab with what the system needs before a job. keep_logs: directory that gets the lab's files at the end."""
    directory = Path(tempfile.mkdtemp(prefix=f"bagua-faults-{name}-"))
    try:
        with Lab(MOST_HOSTS + 1, directory) as lab:
            system = SYSTEMS[name](lab)
            system.prepare()
            yield lab, system
            if keep_logs is not None:
                skip = shutil.ignore_patterns("etcd-*", "scripts")
                shutil.copytree(directory, keep_logs / directory.name, ignore=skip)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


assert LEAST_HOSTS < MOST_HOSTS
assert {row for plan in PLANS.values() for row in plan} <= set(ROWS)
