"""Rule 6: what draws on the budget, the poison sample, and the wait before a respawn."""

from __future__ import annotations

import pytest
from pictures import failure

from bagua_agent.membership.policy import Policy
from bagua_agent.membership.restart_policy import judge, respawn_delay_s


@pytest.mark.parametrize(
    ("failures", "max_restarts", "fails"),
    [
        ([], 0, False),
        ([failure("a0")], 0, True),
        ([failure("a0")], 1, False),
        ([failure("a0", script=False)] * 9, 0, False),
        ([failure("a0", step=1), failure("a0x", step=2)], 2, False),
        ([failure("a0", step=1), failure("a0x", step=2)], 1, True),
        ([failure("a0", step=7), failure("b0", step=7)], 9, True),
        ([failure("a0", step=7), failure("b0", step=7, in_step=False)], 9, False),
        ([failure("a0", step=7), failure("b0", step=7, script=False)], 9, False),
    ],
)
def test_judge(failures: list, max_restarts: int, fails: bool) -> None:  # type: ignore[type-arg]
    assert judge(failures, max_restarts).fail is fails


def test_the_first_failure_is_shown() -> None:
    verdict = judge([failure("b0", order=9), failure("a0", order=4)], 9)
    assert verdict.fail and verdict.first_failure is not None
    assert verdict.first_failure.worker_id == "a0"
    assert "a0 on host-a (ValueError: bad), b0 on host-b" in verdict.reason


@pytest.mark.parametrize(
    ("crashes", "delay_s"),
    [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (7, 16.0), (8, 30.0), (9999, 30.0)],
)
def test_respawn_delay_doubles_up_to_its_bound(crashes: int, delay_s: float) -> None:
    assert respawn_delay_s(crashes, Policy()) == delay_s
