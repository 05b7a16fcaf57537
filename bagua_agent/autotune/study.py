"""Decides which settings of steps a job tries next, and when it stops to try. Pure.

A *study* belongs to one world: the nodes, their workers, and what people pinned. It measures the settings in force,
then others one after the other, and keeps the fastest. Time is the time of training, as the workers measure it; no
clock.

Invariants: what trying has cost exceeds BUDGET of the time of training in this study, and of what the study before it
left unspent at a drift, by at most one report of a measurement and by what the two changes of one trial cost more than
twice the last change; a trial is measured only in a generation that has its settings; settings that are kept were
measured faster than the script's, in two trials of each where the number of trials allows it, or are the script's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from bagua_agent.autotune.proposal import NO_WORKERS, Proposal, Workers, propose
from bagua_agent.autotune.space import Point, Space
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

BUDGET = 0.05  # of the time of training
UNSPENT_S = 600.0  # most time of training before a drift whose budget the next study may use
LEAST_STEPS = 3  # before a rate says anything
NETWORK_STEPS = 8  # of a generation, after which workers have measured the network (bucket_times.py)
EARLY_SHARE = 0.2  # of the confidence time, after which a trial that is clearly slower ends
CLEARLY_SLOWER = 0.9
BETTER_BY = 1.02  # what counts as an improvement; less may be noise
PATIENCE = 12  # trials in a row without one
DRIFT = 1.25  # a rate that is so many times another says that the network has changed
PINNED = ", pinned: "  # in the words of a world, before the settings that people pinned
DRIFTS = 4  # in so many windows in a row, which agree with each other: a busy host's rates swing, and do not


class Phase(Enum):
    WARMING = pb.Study.WARMING  # the settings in force, until training runs evenly
    TRYING = pb.Study.TRYING  # a trial is in force, or on its way
    RESTING = pb.Study.RESTING  # the best settings are in force until the budget allows another trial
    SETTLED = pb.Study.SETTLED  # nothing more is tried while the throughput stays


@dataclass(frozen=True, slots=True)
class Options:
    """The options as the user gave them. algorithms: that may be tried; others never are."""

    level: int = 0
    max_samples: int = 60
    confidence_s: float = 5.0
    warmup_s: float = 30.0
    algorithms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of global rank 0 in a generation: steps, without its first ones, and their time together.

    switch_s: what entering the generation took. gradient_bytes, order: see space.Facts. computing_s: of `seconds`
    without waits for other workers. buckets: bytes and seconds of each bucket's plain sum over all workers, in the
    order of launch, of this generation or the last one in which they were measured; empty: never. warms_up: an
    optimizer of QAdam's is in its warm-up, in which QAdam compresses nothing. before_steps, before_s: steps of the
    worker before these, since it became global rank 0, and their time with that of the switches between them.
    """

    generation: int
    steps: int
    seconds: float
    switch_s: float = 0.0
    gradient_bytes: int = 0
    order: tuple[int, ...] = ()
    computing_s: float = 0.0
    buckets: tuple[tuple[int, float], ...] = ()
    warms_up: bool = False
    before_steps: int = 0
    before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurement of some settings. ended_s: trained_s of the study at its end."""

    settings: StepSettings
    steps: int
    seconds: float
    ended_s: float = 0.0

    @property
    def rate(self) -> float:
        """The rate in steps a second."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Study:
    number: int = 0  # grows with each study of the job
    world: str = ""
    phase: Phase = Phase.WARMING
    current: StepSettings = AS_SCRIPTED  # that the job should have now
    trials: tuple[Trial, ...] = ()
    trained_s: float = 0.0  # time of training that was measured in this study
    lost_s: float = 0.0  # of it: what slower trials and changes of settings cost
    change_s: float = 0.0  # what the last change of settings cost
    unspent_s: float = 0.0  # time of training before this study, whose budget it may use too
    # of the last measurement that was counted
    generation: int = 0
    steps: int = 0
    seconds: float = 0.0
    before_steps: int = 0
    before_s: float | None = 0.0  # None: an older agent has written the study
    # with the current settings, since they came into force or since the last look at drift
    window_steps: int = 0
    window_s: float = 0.0
    drifts: tuple[
        float, ...
    ] = ()  # rates of the last windows, while they are all above or below the best trial's
    known: Mapping[str, StepSettings] = field(default_factory=dict)  # what studies of other worlds settled on
    forgets: int = 0  # requests to forget that it knows
    proposal: Proposal | None = None  # of another algorithm, for these workers

    @property
    def budget_s(self) -> float:
        """What trying may cost in all."""
        return BUDGET * (self.trained_s + self.unspent_s)

    @property
    def results(self) -> dict[StepSettings, Trial]:
        """The newest trial of each settings."""
        return {trial.settings: trial for trial in self.trials}

    @property
    def best(self) -> Trial | None:
        """The fastest trial; one that is hardly faster than the script's own gives way to it."""
        if not self.trials:
            return None
        results = self.results.values()
        found = max(results, key=lambda trial: trial.rate)
        scripted = next((t for t in results if t.settings.is_empty), None)
        if scripted is not None and found.rate < scripted.rate * BETTER_BY:
            return scripted
        return found

    @property
    def scripted_rate(self) -> float:
        """The rate with the script's settings; 0: not measured."""
        return next((t.rate for t in self.results.values() if t.settings.is_empty), 0.0)

    @property
    def tried(self) -> frozenset[StepSettings]:
        return frozenset(trial.settings for trial in self.trials)

    @property
    def since_better(self) -> int:
        """The number of trials since the last one that was an improvement."""
        best, since = 0.0, 0
        for trial in self.trials:
            since = 0 if trial.rate > best * BETTER_BY else since + 1
            best = max(best, trial.rate)
        return since


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts on which a step of a study depends.

    world: in words. in_force: the record of the measurement's generation is the newest and has the study's current
    settings, under those that people pinned. suggested: by the sampler; None: nothing yet. sampler_gave_up: why no
    suggestion will come; empty: one may. recalled: what an earlier job of this model found in this world and network;
    None: nothing is known. recalled_from: that job. forgets: requests to forget, so far. workers: the world, for
    predictions. waits_for_warm_up: rates of QAdam are wanted, and its optimizer's warm-up is not over.
    """

    world: str
    space: Space
    options: Options
    measured: Measured | None = None
    in_force: bool = False
    suggested: StepSettings | None = None
    sampler_gave_up: str = ""
    recalled: StepSettings | None = None
    recalled_from: str = ""
    forgets: int = 0
    workers: Workers = NO_WORKERS
    waits_for_warm_up: bool = False


@dataclass(frozen=True, slots=True)
class StudyStep:
    """The decision of one call of `step`. asks: for a suggestion of the sampler. event: one line for the job's history;
    empty: nothing happened. settles: the study has found what later jobs may begin with."""

    study: Study
    reason: str
    asks: bool = False
    event: str = ""
    settles: bool = False


def step(study: Study, s: Situation) -> StudyStep:
    """Decides what follows from a measurement, a suggestion, or another world."""
    if s.options.level < 1:
        return StudyStep(study, "autotuning is off")
    if study.forgets != s.forgets:
        known = replace(study, forgets=s.forgets)
        if not study.world:
            return step(known, s)  # this job's first: there is nothing to forget
        warm = study.phase is not Phase.WARMING
        return _begin(_forgetful(known), s.world, "what was found before is forgotten", warm=warm)
    if study.world != s.world:
        return _begin(study, s.world, f"the world is {s.world}", warm=False)
    if s.measured is None or not s.in_force:
        return StudyStep(study, f"waiting for steps with {study.current}")
    study = _counted(study, s.measured)
    if study.phase is Phase.WARMING:
        if study.trained_s < s.options.warmup_s:
            return StudyStep(study, f"warming up: {study.trained_s:.1f} of {s.options.warmup_s:g} s")
        if s.waits_for_warm_up:
            return StudyStep(study, "waiting for the end of QAdam's warm-up")
        study = replace(study, phase=Phase.TRYING, window_steps=0, window_s=0.0)
        return StudyStep(study, f"measuring {study.current}", asks=_asks(study, s))
    if study.phase is Phase.TRYING:
        return _try(study, s)
    drifted = _drift(study, s)
    if drifted is not None:
        return drifted
    if study.phase is Phase.RESTING:
        return _next(study, s, "")
    return StudyStep(study, f"settled on {study.current}")


def _begin(study: Study, world: str, why: str, *, warm: bool) -> StudyStep:
    """Begins a study of its own: what was measured before says nothing about this world. It begins with what is in
    force, or with what a study of the same world has found."""
    known, current = dict(study.known), study.current
    if study.world and study.best is not None:
        known[study.world] = current = study.best.settings  # what is in force may be a slow trial
    begun = Study(
        number=study.number + 1,
        world=world,
        phase=Phase.TRYING if warm else Phase.WARMING,
        current=known.get(world, current),
        generation=study.generation,
        steps=study.steps,
        seconds=study.seconds,
        before_steps=study.before_steps,
        before_s=study.before_s,
        change_s=study.change_s,
        known=known,
        forgets=study.forgets,
        # pinned settings are no other workers: what was proposed is measured once people have pinned it
        proposal=study.proposal if _unpinned(study.world) == _unpinned(world) and not warm else None,
    )
    return StudyStep(begun, why, event=f"study {begun.number} begins with {begun.current}: {why}")


def _unpinned(world: str) -> str:
    return world.partition(PINNED)[0]


def _forgetful(study: Study) -> Study:
    """Returns the study without anything that was measured."""
    return replace(study, world="", current=AS_SCRIPTED, trials=(), known={})


def _counted(study: Study, m: Measured) -> Study:
    """Returns the study with what was trained since the last measurement."""
    if m.generation < study.generation:
        return study  # late
    fresh = m.generation > study.generation
    steps = m.steps if fresh else m.steps - study.steps
    seconds = m.seconds if fresh else m.seconds - study.seconds
    if steps < 0 or seconds < 0:  # another worker is rank 0 by now, and counts from its own beginning
        steps, seconds = 0, 0.0
    best, lost_s, change_s, between_s = study.best, study.lost_s, study.change_s, 0.0
    if fresh:
        between_s, change_s = _change(study, m)
    if fresh and best is not None:
        lost_s += change_s
    if best is not None and study.current != best.settings:
        lost_s += max(0.0, seconds - steps / best.rate)
    return replace(
        study,
        generation=m.generation,
        steps=m.steps,
        seconds=m.seconds,
        before_steps=m.before_steps,
        before_s=m.before_s,
        trained_s=study.trained_s + seconds + between_s,
        lost_s=lost_s,
        change_s=change_s,
        window_steps=study.window_steps + steps,
        window_s=study.window_s + seconds,
    )


def _change(study: Study, m: Measured) -> tuple[float, float]:
    """Returns the time between the last measurement that was counted and the first steps of `m`, of a newer generation,
    and what that change cost: its time without what the best trial would have needed for its steps. It contains the
    steps after the decision on other settings, the switch, and the steps before the first report with them."""
    best = study.best
    if study.before_s is None:
        return m.switch_s, m.switch_s
    steps = m.before_steps - study.before_steps - study.steps
    seconds = m.before_s - study.before_s - study.seconds
    # before the first trial it may be older than the study; it is negative if another worker is rank 0 by now
    if best is None or steps < 0 or seconds < m.switch_s:
        return m.switch_s, m.switch_s
    return seconds, max(m.switch_s, seconds - steps / best.rate)


def _try(study: Study, s: Situation) -> StudyStep:
    """Goes on with a trial that is in force; the first one is of what was in force before."""
    best, confidence_s = study.best, s.options.confidence_s
    asks = _asks(study, s)
    if study.window_steps < LEAST_STEPS or study.window_s <= 0:
        return StudyStep(study, f"measuring {study.current}", asks=asks)
    if best is None and study.steps < NETWORK_STEPS:
        return StudyStep(study, f"measuring the network: {study.steps} of {NETWORK_STEPS} steps", asks=asks)
    trial = Trial(study.current, study.window_steps, study.window_s, study.trained_s)
    slower = best is not None and trial.rate < best.rate
    if study.window_s < confidence_s:
        early = study.window_s >= confidence_s * EARLY_SHARE
        clearly = best is not None and trial.rate < best.rate * CLEARLY_SLOWER
        over = slower and study.lost_s > study.budget_s
        if not (early and clearly) and not over:
            return StudyStep(study, f"measuring {study.current}", asks=asks)
    ended = replace(study, trials=(*study.trials, trial), window_steps=0, window_s=0.0, drifts=())
    found = ended.best
    assert found is not None
    text = (
        f"trial {len(ended.trials)} of study {study.number}: {trial.settings}: {trial.rate:.3g} steps/s; "
        f"best: {found.settings}, {found.rate:.3g} steps/s"
    )
    if s.options.level >= 2:
        ended, about = _with_proposal(ended, s, trial)
        text += about
    return _next(ended, s, text)


def _with_proposal(study: Study, s: Situation, trial: Trial) -> tuple[Study, str]:
    """Returns the study after a trial, with its proposal, and text about it. The first trial gives a proposal, and one
    with the proposed algorithm its measurement."""
    algorithm, m, step_s = trial.settings.algorithm or s.workers.algorithm, s.measured, 1.0 / trial.rate
    found = study.proposal
    if found is not None and found.algorithm == algorithm and not found.measured_s:
        found = replace(found, measured_s=step_s)
        return replace(study, proposal=found), f"; {found}"
    if found is not None or len(study.trials) > 1 or m is None or not m.steps:
        return study, ""
    proposal, about = propose(s.workers, algorithm, step_s, m.computing_s / m.steps, m.buckets)
    if proposal is not None and proposal.is_worth_it:
        allowed = proposal.algorithm in s.options.algorithms
        about += (
            "; it is tried"
            if allowed
            else f"; `bagua-launch tune JOB --algorithm {proposal.algorithm}` sets it"
        )
    return replace(study, proposal=proposal), f"; {about}"


def _next(study: Study, s: Situation, event: str) -> StudyStep:
    """Decides on another trial, a rest, or the end."""
    best = study.best
    assert best is not None
    why = _done(study, s)
    again = _to_repeat(study) if why and len(study.trials) < s.options.max_samples else None
    if why and again is None:
        settled = replace(study, phase=Phase.SETTLED, current=best.settings, window_steps=0, window_s=0.0)
        scripted = study.scripted_rate
        gain = f", {best.rate / scripted - 1:+.1%} against the script's settings" if scripted else ""
        text = f"study {study.number} settles on {best.settings}: {best.rate:.3g} steps/s{gain}; {why}"
        return StudyStep(settled, text, event=f"{event}; {text}" if event else text, settles=True)
    candidate = _candidate(study, s) if again is None else again
    # of the last change at most this, for it may contain a pause of the script's own, as an evaluation
    change_s = min(study.change_s, 2 * s.options.confidence_s)
    worst_s = s.options.confidence_s * EARLY_SHARE + 2 * change_s
    if candidate is not None and study.lost_s + worst_s <= study.budget_s:
        begun = replace(study, phase=Phase.TRYING, current=candidate, window_steps=0, window_s=0.0, drifts=())
        if s.recalled is not None and candidate == s.space.nearest(s.recalled):
            text = (
                f"trying {candidate}, which job {s.recalled_from!r} found for this model, world and network"
            )
            event = f"{event}; {text}" if event else text
        if again is not None:
            text = f"trying {again} again, for {why}"
            event = f"{event}; {text}" if event else text
        return StudyStep(begun, f"trying {candidate}", asks=_asks(begun, s), event=event)
    rests = study
    if study.phase is not Phase.RESTING:
        rests = replace(study, phase=Phase.RESTING, current=best.settings, window_steps=0, window_s=0.0)
    missing = "the budget" if candidate is not None else "a suggestion"
    reason = f"waiting for {missing}: {study.lost_s:.2f} of {study.trained_s:.1f} s were lost by trials"
    return StudyStep(rests, reason, asks=_asks(rests, s), event=event)


def _done(study: Study, s: Situation) -> str:
    """Returns why nothing more is tried; empty if more is."""
    if len(study.trials) >= s.options.max_samples:
        return f"{len(study.trials)} trials are as many as were asked for"
    if _first_untried(study, s) is not None:
        return ""
    if sum(s.space.point_of(settings) is not None for settings in study.tried) >= s.space.size:
        return "all settings were tried"
    if study.since_better >= PATIENCE:
        return f"the last {study.since_better} trials were no better"
    return s.sampler_gave_up


def _to_repeat(study: Study) -> StepSettings | None:
    """Returns settings to measure again: of those between which the study decides, the script's and the best, one with
    a single trial. The script's come first of all trials, when the job has hardly begun."""
    best, tried = study.best, Counter(trial.settings for trial in study.trials)
    scripted = next((settings for settings in tried if settings.is_empty), None)
    if best is None or scripted is None or best.settings == scripted:
        return None
    return next((settings for settings in (scripted, best.settings) if tried[settings] == 1), None)


def _candidate(study: Study, s: Situation) -> StepSettings | None:
    first = _first_untried(study, s)
    if first is not None:
        return first
    return s.suggested if s.suggested is not None and s.suggested not in study.tried else None


def _first_untried(
    study: Study, s: Situation, under_way: frozenset[StepSettings] = frozenset()
) -> StepSettings | None:
    """Returns the next settings of the fixed order: after the first trial what an earlier job found, then the first
    points, and then the best choices of each dimension together, since most dimensions help on their own. under_way:
    settings that count as tried."""
    tried, space = study.tried | under_way, s.space
    if s.recalled is not None and tried and (recalled := space.nearest(s.recalled)) not in tried:
        return recalled
    found = next((x for x in map(space.settings_at, space.first_points()) if x not in tried), None)
    if found is not None:
        return found
    together = space.settings_at(_best_of_each(study, space))
    return together if together not in tried else None


def _best_of_each(study: Study, space: Space) -> Point:
    """Returns by dimension the choice that was fastest among the first points."""
    rates = {settings: trial.rate for settings, trial in study.results.items()}
    origin = next(space.first_points())
    best, best_rates = list(origin), [rates.get(space.settings_at(origin), 0.0)] * len(origin)
    for point in space.first_points():
        rate = rates.get(space.settings_at(point), 0.0)
        for axis, place in enumerate(point):
            if place and rate > best_rates[axis]:
                best[axis], best_rates[axis] = place, rate
    return tuple(best)


def _asks(study: Study, s: Situation) -> bool:
    """Tells whether the sampler should begin now. It works while a trial is measured, so that none waits for it."""
    if _first_untried(study, s, frozenset({study.current})) is not None or _done(study, s):
        return False
    return s.suggested is None and not s.sampler_gave_up and study.phase is not Phase.SETTLED


def _drift(study: Study, s: Situation) -> StudyStep | None:
    """Returns the step after a window of measurement; a new study if the throughput is no more what the best trial had:
    the network has changed, or the script. None if the window is too short."""
    best = study.best
    if best is None or study.window_s < s.options.confidence_s or study.window_steps < LEAST_STEPS:
        return None
    rate = study.window_steps / study.window_s
    drifts = _drifts(study.drifts, rate, best.rate)
    if len(drifts) >= DRIFTS and max(drifts) <= min(drifts) * DRIFT:
        why = f"the throughput went from {best.rate:.3g} to {rate:.3g} steps/s"
        forgetful = replace(study, known={w: k for w, k in study.known.items() if w != study.world})
        begun = _begin(forgetful, study.world, why, warm=True)
        known = {w: k for w, k in begun.study.known.items() if w != study.world}
        # what is in force may be slow by now, so trials begin at once with what the settled time has not spent
        unspent_s = min(UNSPENT_S, (study.budget_s - study.lost_s) / BUDGET)
        return replace(
            begun,
            study=replace(begun.study, current=study.current, known=known, unspent_s=max(0.0, unspent_s)),
        )
    looked = replace(study, drifts=drifts, window_steps=0, window_s=0.0)
    return StudyStep(looked, f"{rate:.3g} steps/s with {study.current}", asks=_asks(looked, s))


def _drifts(before: tuple[float, ...], rate: float, expected: float) -> tuple[float, ...]:
    """Returns the newest rates that differ from what was expected, all in one direction."""
    if expected / DRIFT <= rate <= expected * DRIFT:
        return ()
    same = before and (before[-1] > expected) == (rate > expected)
    return (*before, rate)[-DRIFTS:] if same else (rate,)
