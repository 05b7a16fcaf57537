"""Rule 6: what draws on the budget, the poison sample, and the wait before a respawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pictures import failure

from bagua_agent.membership.failures.restart_policy import judge, respawn_delay_s, succession
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import FailureView


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
    assert "slot 0 on host-a (ValueError: bad), slot 0 on host-b" in verdict.reason


def test_a_poison_sample_is_told_by_its_step() -> None:
    verdict = judge([failure("a0", step=7, order=1), failure("b0", step=7, order=2)], 9)
    assert verdict.reason.startswith("two workers failed in step 7, so it is likely to fail always: ")


def test_joiners_that_fail_in_their_first_step_show_no_poison_sample() -> None:
    """They had no share of its samples: it is their node that does not work."""
    one, other = (replace(failure(w, step=7, order=i), joining=True) for i, w in enumerate(("c0", "c1")))
    assert not judge([one, other], 2, trained=True).fail
    assert judge([one, other], 1, trained=True).fail, "each still draws on the budget"
    assert not judge([one, failure("a0", step=7, order=2)], 2, trained=True).fail


def test_an_exceeded_budget_reads_well() -> None:
    one, other = (replace(failure(f"{n}0", order=i), step=i, global_rank=i) for i, n in enumerate("ab"))
    assert (
        judge([one], 0).reason == "1 script failure, none allowed: global rank 0 on host-a (ValueError: bad)"
    )
    assert judge([one, other], 1).reason == (
        "2 script failures, 1 allowed; first: global rank 0 on host-a (ValueError: bad)"
    )


@pytest.mark.parametrize(
    ("crashes", "delay_s"),
    [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (7, 16.0), (8, 30.0), (9999, 30.0)],
)
def test_respawn_delay_doubles_up_to_its_bound(crashes: int, delay_s: float) -> None:
    assert respawn_delay_s(crashes, Policy()) == delay_s


def early(worker: str) -> FailureView:
    """It failed before it was ever a member."""
    return replace(failure(worker, in_step=False), was_member=False)


def test_a_failure_before_the_first_generation_is_the_scripts_and_later_the_nodes() -> None:
    nine = [early(f"c{i}") for i in range(9)]
    assert judge(nine, 0, trained=False).fail
    assert not judge(nine, 0, trained=True).fail
    assert judge([*nine, failure("a0")], 0, trained=True).fail, "a member's failure still counts"


@pytest.mark.parametrize(
    ("crashes", "trained", "max_restarts", "delay_s"),
    [
        (1, True, 0, 0.0),
        (4, True, 0, 2.0),
        (5, True, 0, None),  # given up: the node does not work, and the job goes on
        (1, False, 0, None),  # no worker trains yet: the script does not work, and the job fails
        (1, False, 1, 0.0),
        (5, False, 9, None),
    ],
)
def test_a_slot_whose_workers_never_start_well_is_given_up(
    crashes: int, trained: bool, max_restarts: int, delay_s: float | None
) -> None:
    follows = succession([], early("c0"), crashes, max_restarts, Policy(), trained=trained)
    assert follows.delay_s == delay_s
    assert (follows.reason == "") == (delay_s is not None)


def test_a_slot_given_up_says_why() -> None:
    reason = succession([], early("c0"), 5, 0, Policy(), trained=True).reason
    assert reason.startswith(
        "5 workers in a row ended before their first step, the last with: ValueError: bad"
    )


def test_signals_before_the_first_step_give_the_slot_up_too_and_draw_on_nothing() -> None:
    killed = replace(early("c0"), script_failure=False)
    assert succession([], killed, 4, 0, Policy(), trained=False).delay_s == 2.0
    assert succession([], killed, 5, 0, Policy(), trained=False).delay_s is None


def test_a_casualty_that_was_known_first_is_not_the_first_failure() -> None:
    casualty = replace(failure("a0", step=3, order=1), summary="DistBackendError: NCCL error")
    assert not judge([casualty, failure("b0", step=3, order=2)], 2).fail, "no poison sample either"
    verdict = judge([casualty, failure("b0", order=2)], 1)
    assert verdict.fail and verdict.first_failure is not None
    assert verdict.first_failure.worker_id == "b0" and "(ValueError: bad)" in verdict.reason


@pytest.mark.parametrize(
    ("kills", "max_restarts", "fails"), [(10, 0, False), (11, 0, True), (11, 20, False), (21, 20, True)]
)
def test_kills_in_a_row_have_a_bound_of_their_own(kills: int, max_restarts: int, fails: bool) -> None:
    killed = replace(failure("a0", script=False), kills_in_a_row=kills)
    verdict = judge([killed], max_restarts, trained=True)
    assert verdict.fail is fails and ("killed in one slot of host-a" in verdict.reason) is fails


def test_kills_with_progress_between_never_end_a_job() -> None:
    killed = [replace(failure(f"a{i}", script=False), kills_in_a_row=1) for i in range(9)] * 20
    assert not judge(killed, 0, trained=True).fail
