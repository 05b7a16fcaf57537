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
from dataclasses import dataclass, replace

from bagua_agent.autotune.proposal import NO_WORKERS, Workers, propose
from bagua_agent.autotune.space import Point, Space
from bagua_agent.autotune.study_account import counted
from bagua_agent.autotune.study_records import BUDGET, Measured, Options, Phase, Study, Trial
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

UNSPENT_S = 600.0  # most time of training before a drift whose budget the next study may use
LEAST_STEPS = 3  # before a rate says anything
NETWORK_STEPS = 8  # of a generation, after which workers have measured the network (bucket_times.py)
EARLY_SHARE = 0.2  # of the confidence time, after which a trial that is clearly slower ends
CLEARLY_SLOWER = 0.9
PATIENCE = 12  # trials in a row without one
DRIFT = 1.25  # a rate that is so many times another says that the network has changed
PINNED = ", pinned: "  # in the words of a world, before the settings that people pinned
DRIFTS = 4  # in so many windows in a row, which agree with each other: a busy host's rates swing, and do not


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
    study = counted(study, s.measured)
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
