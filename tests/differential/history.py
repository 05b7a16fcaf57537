"""The joins, leaves and losses of workers that a seed draws.

A history is a value: how many workers begin, and events in the order of the steps at which they happen. One worker of
the first generation is spared all of them, so the job always has a holder of its state. Joins and leaves come with the
step under way when they are asked for; the worker that asks waits until the generation is built, so the switch follows
that very step unless a loss comes between.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.differential.features import PLAIN, Features

CHECKPOINT_EVERY = 2  # steps, of jobs that go on from a checkpoint
# failpoints of a worker that holds the state, as bagua_core/elastic/failpoints.py names them
STEP_POINTS = ("step.begin", "reduction.before", "reduction.done", "commit.before", "commit.after")
# of the script itself before its allreduce, and when that is done
EVALUATION_POINTS = ("evaluation", "outside.done")
# of a worker that holds the state while another joins, and of the one that joins
CHANGE_POINTS = ("switch.before", "entry.built", "entry.exchanged", "heal.send")
ENTERS_AGAIN_STEPS = 6  # after a loss in the step in which a worker enters, it has entered again
NEWCOMER_POINTS = ("entry.exchanged", "heal.receive", "heal.swap", "commit.before")


@dataclass(frozen=True, slots=True)
class Event:
    """kind: "kill", "join" or "leave". worker: its number. point: a failpoint's name, or "step", "part" or "evaluation"
    of the script itself. at: the job's step, or the epoch of an evaluation; None: the first time that it comes there.
    """

    kind: str
    worker: int
    point: str
    at: int | None

    def __str__(self) -> str:
        where = "" if self.at is None else f"@{self.at}"
        return f"{self.kind} w{self.worker} {self.point}{where}"


@dataclass(frozen=True, slots=True)
class History:
    """first: workers of the first generation. resume_at, resumed_by: at that step all workers are killed, and so many
    others go on from a checkpoint; 0: that does not happen. settled: they are killed once the checkpoints due by then
    are written, else at whatever is written. later: events of those that go on. least: the job's minimum, below which a
    loss takes in newcomers at once.
    """

    first: int
    events: tuple[Event, ...] = ()
    resume_at: int = 0
    resumed_by: int = 0
    settled: bool = False
    least: int = 1
    later: tuple[Event, ...] = ()

    @property
    def changes_rank_0(self) -> bool:
        """Whether another worker than the first one of the run may be rank 0 in some step."""
        return any(e.worker == 0 and e.kind != "join" for e in (*self.events, *self.later))

    @property
    def workers(self) -> int:
        """Of the run that the events belong to, joiners included."""
        return max([self.first - 1, *(e.worker for e in self.events)]) + 1

    @property
    def names(self) -> tuple[str, ...]:
        names = {f"{e.kind}={e.point}" for e in (*self.events, *self.later)}
        return tuple(sorted(names | ({"resume"} if self.resumed_by else set())))

    def __str__(self) -> str:
        how = " settled" if self.settled else ""
        resume = f"; all killed @{self.resume_at}{how}, {self.resumed_by} resume" if self.resumed_by else ""
        least = f", {self.least} at least" if self.least > 1 else ""
        head = f"{self.first} workers{least}" + "".join(f"; {e}" for e in self.events)
        return head + resume + "".join(f"; {e}" for e in self.later)


class _Plan:
    """The membership as far as it is planned, step by step."""

    def __init__(self, f: Features, chance: random.Random, first: int, begin: int = 0) -> None:
        """begin: the first workers may go on at this step."""
        self.f, self.chance = f, chance
        self.begin = begin
        self.first = first
        self.last_at = 0
        self.count = self.first
        self.present = list(range(self.first))
        self.spared = chance.randrange(self.first)
        self.events: list[Event] = []

    def victims(self) -> list[int]:
        """Joiners are not killed at a step's number: the step at which one is in may come later."""
        return [w for w in self.present if w != self.spared and w < self.first]

    def kill(self, at: int, points: tuple[str, ...] = STEP_POINTS) -> None:
        victims = self.victims()
        if not victims:
            return
        victim = self.chance.choice(victims)
        point = self.chance.choice(points)
        self.last_at = at
        if self.f.goes_on_behind_a_reduction and self.chance.random() < 0.4:
            point = "part"
        has_evaluation = self.f.evaluation != PLAIN and self.f.loop != "next_step"
        if has_evaluation and points is STEP_POINTS and self.chance.random() < 0.3:
            epoch = min(at // self.f.batches, self.f.epochs - 2)
            ends_at = (epoch + 1) * self.f.batches
            if ends_at > self.begin:
                point, at = self.chance.choice(tuple(zip(EVALUATION_POINTS, (epoch, ends_at), strict=True)))
        self.present.remove(victim)
        self.events.append(Event("kill", victim, point, at))

    def join(self, at: int) -> None:
        """Close behind another event the switch may follow a later step, so no fault is planned for it then. A loss
        while the newcomer enters delays it by some steps, which must be left."""
        is_close = bool(self.events) and at - self.last_at < 4
        is_late = at > self.f.steps - ENTERS_AGAIN_STEPS
        if len(self.present) >= self.f.most_workers:
            return
        joiner, self.count = self.count, self.count + 1
        self.last_at = at
        fate = self.chance.random()
        has_evaluation = self.f.evaluation != PLAIN and self.f.loop != "next_step"
        if has_evaluation and (at + 1) % self.f.batches == 0 and fate < 0.7:
            # It is asked for, and its generation built, in the middle of an evaluation.
            self.events.append(Event("join", joiner, "evaluation", at // self.f.batches))
            self.present.append(joiner)
            return
        self.events.append(Event("join", joiner, "step", at))
        if fate < 0.15:
            point = self.chance.choice(NEWCOMER_POINTS)
            self.events.append(Event("kill", joiner, point, None))
            return
        self.present.append(joiner)
        if fate < 0.35 and not is_close and not is_late:
            # A holder is lost while the newcomer enters; before the switch its last commit is that of step `at`.
            point = self.chance.choice(CHANGE_POINTS)
            victims = self.victims()
            if victims:
                victim = self.chance.choice(victims)
                self.present.remove(victim)
                self.events.append(Event("kill", victim, point, at + 1))

    def leave(self, at: int) -> None:
        leavers = [w for w in self.victims() if len(self.present) > 1]
        if leavers:
            leaver = self.chance.choice(leavers)
            self.present.remove(leaver)
            self.last_at = at
            self.events.append(Event("leave", leaver, "step", at))


def draw(seed: int, f: Features) -> History:
    chance = random.Random(f"history {seed}")
    if chance.random() < 0.1 and f.loop != "next_step":
        return _resumed(f, chance)
    plan = _Plan(f, chance, chance.choice((2, 2, 3, 3, 4)))
    # Of the run's steps the first is left to the first generation and the last to what the last event leaves over.
    steps = range(1, f.steps - 2)
    ends = [s for s in steps if (s + 1) % f.batches == 0]
    at = 0
    for number in range(chance.choice((1, 1, 2, 2, 3))):
        left = [s for s in steps if s >= at + (1 if number and chance.random() < 0.3 else 2)]
        if any(e.kind == "join" for e in plan.events[-2:]):
            left = [s for s in left if s <= f.steps - ENTERS_AGAIN_STEPS or s >= at + ENTERS_AGAIN_STEPS]
        if not left:
            break
        at = (
            chance.choice([s for s in ends if s in left] or left)
            if chance.random() < 0.3
            else chance.choice(left)
        )
        happens = chance.choices((plan.kill, plan.join, plan.leave), (5, 3, 2))[0]
        happens(at)
        if happens == plan.kill and chance.random() < 0.2:
            plan.kill(at)  # two in one step
    # The job waits while there are fewer than its minimum, so only a join may make up for a loss before it comes.
    left_at_worst = plan.first - sum(1 for e in plan.events if e.kind != "join")
    joins_first = bool(plan.events) and plan.events[0].kind == "join"
    least = plan.first if joins_first and left_at_worst + 1 >= plan.first else 1
    return History(plan.first, tuple(plan.events), least=least)


def _resumed(f: Features, chance: random.Random) -> History:
    """All workers are lost, perhaps one of them before the others, and one of those that go on from the checkpoint."""
    first, others = chance.sample((1, 2, 3), 2)
    at = chance.randint(f.batches + 1, f.steps - 3)
    before, after = _Plan(f, chance, first), _Plan(f, chance, others, begin=at)
    if at > 4 and chance.random() < 0.5:
        before.kill(chance.randint(1, at - 4), STEP_POINTS[:-1])
    if chance.random() < 0.6:
        joins = at + 1 <= f.steps - ENTERS_AGAIN_STEPS
        happens = chance.choice((after.kill, after.leave, *((after.join,) if joins else ())))
        last = f.steps - (ENTERS_AGAIN_STEPS if happens == after.join else 3)
        happens(chance.randint(at + 1, max(at + 1, last)))
    settled = chance.random() < 0.7
    return History(first, tuple(before.events), at, others, settled, later=tuple(after.events))


def parse(text: str) -> History:
    """What str() of a history gives, such as "3 workers; kill w1 commit.after@5; join w3 step@7"."""
    head, *rest = (part.strip() for part in text.split(";"))
    workers, _, least = head.partition(",")
    events: list[Event] = []
    later: list[Event] = []
    resume_at, resumed_by, settled = 0, 0, False
    for part in rest:
        words = part.replace(",", "").split()
        if words[0] == "all":
            settled = words[3] == "settled"
            resume_at, resumed_by = int(words[2][1:]), int(words[-2])
            continue
        kind, worker, where = words
        point, _, at = where.partition("@")
        event = Event(kind, int(worker[1:]), point, int(at) if at else None)
        (later if resumed_by else events).append(event)
    return History(
        int(workers.split()[0]),
        tuple(events),
        resume_at,
        resumed_by,
        settled,
        int(least.split()[0]) if least else 1,
        tuple(later),
    )
