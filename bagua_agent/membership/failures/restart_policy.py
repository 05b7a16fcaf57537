"""Decides when a worker's failure ends the job, and when its successor starts.

Only script failures draw on the job's budget: signals from outside, lost hosts, changes of membership and their
casualties (secondary_failure.py) do not. Kills in a row without progress have a bound of their own. Once the job has
trained, a worker that fails before it was ever a member does not count either: the same script works elsewhere. Does
not know generations: a poison sample is found by the step that two workers failed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bagua_agent.base import backoff
from bagua_agent.base.plain_text import counted
from bagua_agent.membership.failures.root_cause import first_cause, is_casualty, tells_of_another
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import FailureView
from bagua_agent.membership.worker_names import named_failure


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """The judgement whether failures end the job. first_failure: the one to show first, since the others are often its
    consequence; see root_cause.py."""

    fail: bool
    reason: str
    first_failure: FailureView | None = None


def judge(
    failures: Iterable[FailureView],
    max_restarts: int,
    *,
    trained: bool = False,
    most_kills: int = Policy().most_kills_in_a_row,
) -> FailureVerdict:
    """Decides whether these failures end the job. trained: a step of it is known to have been committed.

    most_kills: in a row, in one slot, without progress in between.
    """
    failures = sorted(failures, key=lambda f: f.order)
    for failure in failures:
        if reason := killed_too_often(failure, max_restarts, most_kills):
            return FailureVerdict(True, reason, failure)
    script = [f for f in failures if _counts(f, trained)]
    first_in_step: dict[int, FailureView] = {}
    for failure in script:
        if not failure.in_step or failure.joining or is_casualty(failure.summary, failure.traceback_tail):
            continue  # a joiner trains on no samples yet, and what a lost peer explains says nothing of them
        first = first_in_step.setdefault(failure.step, failure)
        if first.worker_id != failure.worker_id:
            # The same samples would fail holder after holder until no worker has the state.
            return FailureVerdict(
                True,
                f"two workers failed in step {failure.step}, so it is likely to fail always: "
                f"{named_failure(first)}, {named_failure(failure)}",
                first,
            )
    cause = first_cause(script)
    if cause is not None and len(script) > max_restarts:
        which = ":" if len(script) == 1 else "; first:"
        return FailureVerdict(
            True, f"{over_budget(len(script), max_restarts)}{which} {named_failure(cause)}", cause
        )
    return FailureVerdict(False, f"{len(script)} of {max_restarts} script failures used")


def over_budget(script_failures: int, max_restarts: int) -> str:
    """Describes a budget of failures that is used up, as "1 script failure, none allowed"."""
    return f"{counted(script_failures, 'script failure')}, {max_restarts or 'none'} allowed"


def killed_too_often(failure: FailureView, max_restarts: int, most_kills: int) -> str:
    """Returns why a worker that was killed ends the job; "" if it does not. A budget beyond most_kills allows as many
    kills."""
    if failure.kills_in_a_row <= max(most_kills, max_restarts):
        return ""
    return (
        f"{failure.kills_in_a_row} workers in a row were killed in one slot of {failure.node_name} without a "
        f"committed step in between; the last: {failure.summary}"
    )


def in_doubt(
    failures: Iterable[FailureView], max_restarts: int, *, trained: bool, since_s: float
) -> tuple[FailureView, ...]:
    """Returns the failures that end the job although they tell of another's end, which may yet become known, and that
    were seen from since_s on; none if the job ends without them too."""
    every = list(failures)
    doubtful = tuple(
        f
        for f in every
        if _counts(f, trained) and f.seen_since_s >= since_s and tells_of_another(f.summary, f.traceback_tail)
    )
    rest = [f for f in every if f not in doubtful]
    return () if not doubtful or judge(rest, max_restarts, trained=trained).fail else doubtful


def _counts(failure: FailureView, trained: bool) -> bool:
    return failure.script_failure and (failure.was_member or not trained)


def respawn_delay_s(early_crashes: int, policy: Policy) -> float:
    """Returns how long to wait before a slot's next worker, in seconds.

    early_crashes: workers of this slot in a row that ended before their first ready step.
    """
    return backoff.delay_s(early_crashes - 1, policy.respawn_first_delay_s, policy.respawn_longest_delay_s)


@dataclass(frozen=True, slots=True)
class Succession:
    """The decision about a slot after its worker's end: another worker after delay_s, or none (None). reason: why none.
    fails_job: because the whole job ends with it."""

    delay_s: float | None
    reason: str = ""
    fails_job: bool = False


def succession(
    earlier: Iterable[FailureView],
    failure: FailureView,
    early_crashes: int,
    max_restarts: int,
    policy: Policy,
    *,
    trained: bool,
) -> Succession:
    """Decides whether a slot gets another worker after a failure, and when.

    earlier: the job's failures before `failure`. early_crashes: of the slot, in a row, this one included. A slot whose
    workers never come to their first step is given up: it is the node that does not work, and starting processes
    forever mends nothing. The job goes on without it.
    """
    verdict = judge([*earlier, failure], max_restarts, trained=trained, most_kills=policy.most_kills_in_a_row)
    if verdict.fail:
        return Succession(None, verdict.reason, fails_job=True)
    if early_crashes >= policy.crashes_before_quarantine:
        return Succession(
            None,
            f"{early_crashes} workers in a row ended before their first step, the last with: {failure.summary}; "
            "no more are started here, and the job goes on without",
        )
    return Succession(respawn_delay_s(early_crashes, policy))
