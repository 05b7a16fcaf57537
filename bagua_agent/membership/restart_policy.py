"""When does a worker's failure end the job, and when is its successor started?

Only script failures draw on the job's budget: signals, lost hosts and changes of membership do not.
Knows nothing of generations: a poison sample is found by the step that two workers failed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import FailureView


@dataclass(frozen=True, slots=True)
class Verdict:
    """first_failure: the one to show first, since later ones are often its consequence."""

    fail: bool
    reason: str
    first_failure: FailureView | None = None


def judge(failures: Iterable[FailureView], max_restarts: int) -> Verdict:
    """Whether these failures end the job."""
    script = sorted((f for f in failures if f.script_failure), key=lambda f: f.order)
    first_in_step: dict[int, FailureView] = {}
    for failure in script:
        if not failure.in_step:
            continue
        first = first_in_step.setdefault(failure.step, failure)
        if first.worker_id != failure.worker_id:
            # The same samples would fail holder after holder until nobody has the state.
            return Verdict(
                True,
                f"two workers failed in step {failure.step}, so it is likely to fail always: "
                f"{first.worker_id} on {first.node_name} ({first.summary}), "
                f"{failure.worker_id} on {failure.node_name} ({failure.summary})",
                first,
            )
    if len(script) > max_restarts:
        return Verdict(
            True,
            f"{len(script)} script failures, {max_restarts} allowed; first: "
            f"{script[0].worker_id} on {script[0].node_name} ({script[0].summary})",
            script[0],
        )
    return Verdict(False, f"{len(script)} of {max_restarts} script failures used")


def respawn_delay_s(early_crashes: int, policy: Policy) -> float:
    """How long to wait before a slot's next worker, in seconds.

    early_crashes: workers of this slot in a row that ended before their first ready step.
    """
    if early_crashes <= 1:
        return 0.0
    # bounded exponent: 2 ** 10000 is no float
    doubled = policy.respawn_first_delay_s * 2.0 ** min(early_crashes - 2, 64)
    return min(doubled, policy.respawn_longest_delay_s)
