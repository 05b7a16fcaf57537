"""Bad input is refused where it comes in, with the value and what to do."""

from __future__ import annotations

import pytest

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView, OrderView, SubmissionView


@pytest.mark.parametrize("numbers", [(0, 1), (2, 1), (-1, -1)])
def test_impossible_numbers_of_nodes(numbers: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=f"job 'x': nodes must be 1 <= least <= most, not {numbers[0]}:{numbers[1]}"
    ):
        SubmissionView("x", *numbers)


def test_negative_slots() -> None:
    with pytest.raises(ValueError, match="not -1; 0 asks for all slots"):
        SubmissionView("x", 1, 1, -1)


def test_one_id_twice() -> None:
    job = SubmissionView("x", 1, 1)
    with pytest.raises(ValueError, match="twice under one id: x"):
        ClusterView(submissions=(job, job))
    with pytest.raises(ValueError, match="node 'a' name a job twice"):
        ClusterView(orders={"a": (OrderView("x", 1, 1), OrderView("x", 2, 2))})


def test_policies_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="settle_s must not be negative, not -1"):
        ClusterPolicy(settle_s=-1)
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        ClusterPolicy(failures_before_left_out=0)
