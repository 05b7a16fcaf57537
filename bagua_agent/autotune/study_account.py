"""Counts what a study has trained and what its trials have cost. Pure."""

from __future__ import annotations

from dataclasses import replace

from bagua_agent.autotune.study_records import Measured, Study


def counted(study: Study, m: Measured) -> Study:
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
