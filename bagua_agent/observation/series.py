"""Records how a job has gone so far, from its facts at successive moments: speed, the script's numbers, and each rank's
time.

Pure: the caller brings the facts and their time. Bounded, see Thinned. Looks may be far more frequent than steps, so
rates and each rank's time are of looks that saw new steps. Begins empty in each process that looks at a job, and with
the next job of the same name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median_low

from bagua_agent.observation.first_seen import FirstSeen
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.thinned import Thinned
from bagua_contract import control_pb2

MOST_POINTS = 400
MOST_TIMED = 90
RECENT_LOOKS = 5
RECENT_S = 5.0  # the rate that a worker reports holds for so long, or for a step
STANDSTILL = 3.0  # times the time from one change of the step to the next: after that the speed is drawn as 0
MOST_WORKERS = 4096  # whose time is summed up, those that have ended included
USUAL_OF_LOOKS = 5  # the newest ones with new steps, of whose step times the usual step is the median


@dataclass(frozen=True, slots=True)
class Point:
    """The job at one moment. step: committed; 0: unknown. step_samples: of all workers; 0: unknown. metrics: means over
    the workers with a rank that report them. computing_s: seconds of computing a step, by global rank, over the steps
    since the point before; empty without a new step; in a deterministic job those that an equal part of its virtual
    shards would have taken."""

    at_unix_s: float
    generation: int
    world_size: int
    step: int
    step_samples: int
    metrics: Mapping[str, float]
    computing_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class StepChange:
    """A look that saw a later step than the look before. look: its number."""

    look: int
    at_unix_s: float
    step: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The data that a worker hands to Gloo and NCCL. bytes_per_s: since the look before. bytes_a_step: between the two
    newest looks that saw a new step; None before there is one."""

    bytes_per_s: float
    bytes_a_step: float | None


@dataclass(slots=True)
class StepTimes:
    """A worker's committed steps: their number and seconds at the last look, and the mean time of the steps since the
    look before, for the newest looks with new steps."""

    steps: int = 0
    sum_s: float = 0.0
    newest_s: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_OF_LOOKS))

    def take(self, steps: int, sum_s: float) -> None:
        if steps > self.steps and sum_s > self.sum_s:
            self.newest_s.append((sum_s - self.sum_s) / (steps - self.steps))
        self.steps, self.sum_s = steps, sum_s


@dataclass(slots=True)
class JobSeries:
    """The course of a job so far. timed: the newest points with computing_s, the oldest first. step_since_unix_s: when
    the newest step was first seen. closing_since_unix_s: when the end of all steps was first seen; 0: they go on.
    events: by name, see FirstSeen."""

    timed: deque[Point] = field(default_factory=lambda: deque(maxlen=MOST_TIMED))
    step: int = 0
    step_since_unix_s: float = 0.0
    closing_since_unix_s: float = 0.0
    events: FirstSeen[str] = field(default_factory=FirstSeen)
    _nonce: str = ""  # of the job; empty: unknown
    _past: Thinned[Point] = field(default_factory=lambda: Thinned(MOST_POINTS))
    _looks: int = 0
    # One more than RECENT_LOOKS: the first is then as many looks before the last
    _changes: deque[StepChange] = field(default_factory=lambda: deque(maxlen=RECENT_LOOKS + 1))
    _reported_rate: float = 0.0  # steps per second, by the newest report; 0: unknown
    # Agent id -> of the first look without answer
    _silent_since: dict[str, float] = field(default_factory=dict)
    _steps_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # worker id -> of steps, computing
    _spent: dict[str, Mapping[str, float]] = field(default_factory=dict)  # by worker id
    # Worker id -> its steps, computing seconds
    _before: dict[str, tuple[int, float]] = field(default_factory=dict)
    _step_times: dict[str, StepTimes] = field(default_factory=dict)  # worker id -> while it has a rank

    sent: dict[str, Sent] = field(default_factory=dict)  # worker id -> while it reports
    # Worker id -> time of the look, bytes
    _sent_before: dict[str, tuple[float, int]] = field(default_factory=dict)
    # Worker id -> bytes, steps of the newest look with a new step
    _sent_at_step: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def points(self) -> list[Point]:
        """The job at earlier moments, the oldest first."""
        return self._past.items()

    def take(self, facts: JobFacts) -> None:
        """Takes facts later than those before."""
        nonce = facts.spec.nonce or self._nonce  # a record that can't be read has none
        if self._nonce and nonce != self._nonce:
            self._begin_anew()
        self._nonce = nonce
        reports = {w.worker_id: w for _, w in facts.workers if w.HasField("progress")}
        # the last report of a worker on standby stays as it was, so it says nothing about the job now
        ranked = {id: w for id, w in reports.items() if w.HasField("global_rank")}
        step = max((w.progress.step for w in reports.values()), default=0)
        self._take_step(step, facts.at_unix_s)
        newest = max(ranked.values(), key=lambda w: w.progress.step, default=None)
        self._reported_rate = newest.progress.steps_per_s if newest is not None else 0.0
        point = Point(
            facts.at_unix_s,
            facts.generation.number if facts.generation else 0,
            facts.generation.world_size if facts.generation else 0,
            step,
            max((w.progress.step_samples for w in reports.values()), default=0),
            mean_metrics(ranked.values()),
            self._computing(reports),
        )
        self._past.append(point)
        if point.computing_s:
            self.timed.append(point)
        self._take_sent(facts.at_unix_s, reports)
        self._step_times = {id: self._step_times.get(id, StepTimes()) for id in ranked}
        for worker_id, times in self._step_times.items():
            progress = reports[worker_id].progress
            times.take(sum(progress.step_counts), progress.step_sum_s)
        self.closing_since_unix_s = (self.closing_since_unix_s or facts.at_unix_s) if facts.closing else 0.0
        self.events.take({event.name: event.time_unix_s for event in facts.events}, facts.at_unix_s)
        silent = [agent.agent_id for agent in facts.agents if agent.is_silent]
        self._silent_since = {agent: self.silent_since(agent, facts.at_unix_s) for agent in silent}
        for worker_id, worker in reports.items():
            self._spent[worker_id] = dict(worker.progress.spent_s)
            self._steps_s[worker_id] = (worker.progress.step_sum_s, worker.progress.computing_s)
        while len(self._spent) > MOST_WORKERS:
            oldest = next(iter(self._spent))
            del self._spent[oldest], self._steps_s[oldest]

    def _take_step(self, step: int, at_unix_s: float) -> None:
        self._looks += 1
        last = self._past.newest
        is_earlier = bool(self._changes) and 0 < step < self._changes[-1].step
        if is_earlier or (last is not None and at_unix_s <= last.at_unix_s):
            self._changes.clear()  # it goes on from a checkpoint, or the clock was set back
        elif step > self.step > 0:
            self._changes.append(StepChange(self._looks, at_unix_s, step))
        if step != self.step or not self.step_since_unix_s:
            self.step, self.step_since_unix_s = step, at_unix_s

    def _begin_anew(self) -> None:
        empty = JobSeries()
        for each in fields(self):
            setattr(self, each.name, getattr(empty, each.name))

    def silent_since(self, agent_id: str, now_unix_s: float) -> float:
        """Returns when the agent was first seen without an answer since its last one; now if it answers."""
        return self._silent_since.get(agent_id, now_unix_s)

    def spent_s(self) -> dict[str, float]:
        """Returns the seconds by use, of all workers that were seen."""
        total: dict[str, float] = {}
        for spent in self._spent.values():
            for use, seconds in spent.items():
                total[use] = total.get(use, 0.0) + seconds
        return total

    def computing_share(self) -> float | None:
        """Returns the share of the time of committed steps in which the workers computed; the rest they waited in
        collectives. None before a step."""
        steps_s = sum(steps for steps, _ in self._steps_s.values())
        return sum(computing for _, computing in self._steps_s.values()) / steps_s if steps_s > 0 else None

    def recent_computing_s(self) -> dict[int, float]:
        """Returns the mean seconds of computing a step, by global rank, over the newest looks with new steps in the
        generation in force."""
        last = self._past.newest
        newest = [p for p in self.timed if last is not None and p.generation == last.generation][
            -RECENT_LOOKS:
        ]
        found: dict[int, list[float]] = {}
        for point in newest:
            for rank, seconds in point.computing_s.items():
                found.setdefault(rank, []).append(seconds)
        return {rank: _mean(values) for rank, values in sorted(found.items())}

    def recent_rate(self) -> float | None:
        """Returns the steps per second, from one change of the step to another, over at least the newest RECENT_LOOKS
        looks; before two changes the rate that the workers report. Without a step for longer than that it falls. None
        where it is unknown."""
        last = self._past.newest
        if last is None or not last.step:
            return None
        if len(self._changes) > 1:
            *earlier, newest = self._changes
            is_long_ago = (c for c in reversed(earlier) if self._looks - c.look >= RECENT_LOOKS)
            since = next(is_long_ago, earlier[0])
            steps: float = newest.step - since.step
            seconds = newest.at_unix_s - since.at_unix_s
        elif self._reported_rate > 0:
            seconds = max(RECENT_S, 1 / self._reported_rate)
            steps = self._reported_rate * seconds
        else:
            return None
        return steps / max(seconds, last.at_unix_s - self.step_since_unix_s)

    def recent_samples_per_s(self) -> float | None:
        """Returns the samples per second of all workers, at the recent rate; None where it is unknown."""
        rate, last = self.recent_rate(), self._past.newest
        return (
            rate * last.step_samples if rate is not None and last is not None and last.step_samples else None
        )

    def usual_step_s(self) -> float:
        """Returns the usual time of a step of the slowest worker, from a boundary to the commit; 0: unknown. Time
        between steps does not count."""
        return max((median_low(t.newest_s) for t in self._step_times.values() if t.newest_s), default=0.0)

    def _take_sent(self, at_s: float, reports: Mapping[str, control_pb2.WorkerNow]) -> None:
        sent_before, at_step, before = self.sent, self._sent_at_step, self._sent_before
        self.sent, self._sent_at_step, self._sent_before = {}, {}, {}
        for worker_id, worker in reports.items():
            sent_bytes, steps = worker.progress.sent_bytes, sum(worker.progress.step_counts)
            before_s, before_bytes = before.get(worker_id, (at_s, sent_bytes))
            step_bytes, before_steps = at_step.get(worker_id, (sent_bytes, steps))
            has_new_step = steps > before_steps
            self._sent_before[worker_id] = at_s, sent_bytes
            self._sent_at_step[worker_id] = (
                (sent_bytes, steps) if has_new_step else (step_bytes, before_steps)
            )
            known = sent_before.get(worker_id)
            if at_s > before_s and sent_bytes >= before_bytes:
                a_step = known.bytes_a_step if known is not None else None
                if has_new_step:
                    a_step = (sent_bytes - step_bytes) / (steps - before_steps)
                self.sent[worker_id] = Sent((sent_bytes - before_bytes) / (at_s - before_s), a_step)
            elif known is not None:
                self.sent[worker_id] = known

    def _computing(self, reports: Mapping[str, control_pb2.WorkerNow]) -> dict[int, float]:
        found = {}
        for worker_id, worker in reports.items():
            steps, computing_s = sum(worker.progress.step_counts), worker.progress.computing_s
            before_steps, before_s = self._before.get(worker_id, (steps, computing_s))
            has_share = worker.progress.HasField("shard_share")
            share = worker.progress.shard_share if has_share else 1.0
            # without a virtual shard it computes nothing that others could be compared with
            if steps > before_steps and worker.HasField("global_rank") and share > 0.0:
                found[worker.global_rank] = (computing_s - before_s) / (steps - before_steps) / share
            self._before[worker_id] = (steps, computing_s)
        for gone in self._before.keys() - reports.keys():
            del self._before[gone]
        return dict(sorted(found.items()))


def speeds(points: Sequence[Point]) -> list[float | None]:
    """Returns the steps per second at each point at which the step changed, since it changed before. None at the
    others, but 0 where it changes no more."""
    found: list[float | None] = []
    last: Point | None = None
    since: Point | None = None  # the step changed there
    since_within_s = 0.0  # or so long before, at most: the distance to the point before
    took_s = 0.0  # from the change before
    for point in points:
        rate = None
        if last is None or not 0 < last.step <= point.step:
            since, took_s = None, 0.0
        elif point.step > last.step:
            new_s = point.at_unix_s - since.at_unix_s if since is not None else 0.0
            # where points become denser a short interval would give a peak: its begin is known too roughly
            if since is None or new_s >= since_within_s / 2:
                if since is not None and new_s > 0:
                    rate = (point.step - since.step) / new_s
                since, since_within_s, took_s = point, point.at_unix_s - last.at_unix_s, new_s
        elif since is not None and 0 < STANDSTILL * took_s < point.at_unix_s - since.at_unix_s:
            rate = 0.0
        found.append(rate)
        last = point
    return found


def mean_metrics(workers: Iterable[control_pb2.WorkerNow]) -> dict[str, float]:
    """Returns the means of what the scripts report, over the workers that report it."""
    values: dict[str, list[float]] = {}
    for worker in workers:
        for name, value in worker.progress.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: _mean(found) for name, found in sorted(values.items())}


def _mean(values: list[float]) -> float:
    """Returns the mean. It is not statistics.fmean, which raises where a diverged loss is infinite on one rank and
    minus infinite on another."""
    return sum(values) / len(values)
