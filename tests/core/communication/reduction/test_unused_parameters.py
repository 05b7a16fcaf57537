"""With find_unused_parameters a parameter that no sample of the step has used keeps a .grad of None."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.reduction.bucket_operation import BucketOperation, LocalMean, Sum
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import MicroBatch
from tests.core.communication.reduction.test_reducer import Branches, Rank, X
from tests.core.communication.worlds import in_process_world, run_ranks


def finders(operation: type[BucketOperation] = Sum) -> list[Rank]:
    """Rank 1 has no share of the step, and fillers in place of samples."""
    members = [Rank(c, w, Branches) for c, w in zip(in_process_world(2), [1.0, 0.0], strict=True)]
    for member in members:
        member.reducer.close()
        member.reducer = Reducer(
            member.model.parameters(), member.engine, operation=operation(), find_unused_parameters=True
        )
    return members


def backward(r: Rank, *, with_branch: bool) -> None:
    r.model(X[:2], with_branch=with_branch).square().mean().backward()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fillers_use_no_parameter(micro_batches: int) -> None:
    members = finders()

    def act(r: Rank) -> None:
        weight = (1.0 - r.global_rank) / micro_batches
        for _ in range(2):
            r.zero_grad()
            for number in range(micro_batches):
                r.engine.begin_micro_batch(MicroBatch(weight, number == micro_batches - 1))
                backward(r, with_branch=r.global_rank == 1)
            r.reducer.step_committed()

    run_ranks(members, act)
    for member in members:
        assert member.model.branch.weight.grad is None and member.model.never.grad is None
        assert member.model.trunk.weight.grad is not None and member.model.trunk.weight.grad.any()


@pytest.mark.parametrize("operation", [Sum, LocalMean])
@pytest.mark.parametrize("with_branch", [False, True])
def test_a_mean_of_the_step_before_stays_on_a_rank_with_fillers(
    operation: type[BucketOperation], with_branch: bool
) -> None:
    members = finders(operation)

    def act(r: Rank) -> torch.Tensor:
        r.engine.begin_micro_batch(MicroBatch(0.5, True))
        backward(r, with_branch=True)
        before: torch.Tensor = r.model.branch.weight.grad.clone()
        r.reducer.step_committed()
        r.engine.begin_micro_batch(MicroBatch(1.0 - r.global_rank, True))
        backward(r, with_branch=with_branch and r.global_rank == 1)
        return before

    for member, before in zip(members, run_ranks(members, act), strict=True):
        torch.testing.assert_close(member.model.branch.weight.grad, before)
