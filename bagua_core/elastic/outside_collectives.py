"""How does a script's own collective end, outside a step or in one?

Outside it is a commit of its own: run again among the members that are left until it succeeded, or answered from the
log of those that others returned. In a step it is part of the step and fails with it. The log is operations.py's;
where the job goes meanwhile is member.py's. Invariant: newcomers take part in none before their first step.
"""

from __future__ import annotations

from typing import Protocol

import torch

from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Pending, ReduceOp
from bagua_core.elastic import operations
from bagua_core.elastic.committed_state import CommittedState
from bagua_core.elastic.member import Member
from bagua_core.elastic.step_interface import StepPlan


class Steps(Protocol):
    """What such a collective asks of the engine."""

    @property
    def in_step(self) -> bool: ...

    @property
    def step_failed(self) -> bool: ...

    @property
    def is_reduced(self) -> bool:
        """The step's reduction is in, so the step is final."""

    @property
    def plan(self) -> StepPlan: ...

    @property
    def newcomers(self) -> frozenset[int]: ...

    def wait(self, pending: Pending) -> None: ...

    def reduction_failed(self, error: Exception) -> None: ...

    def operation_done(self, index: int) -> None:
        """All members but newcomers completed collective `index` after the last step."""


class OutsideCollectives:
    def __init__(self, steps: Steps, state: CommittedState, member: Member) -> None:
        self._steps = steps
        self._state = state
        self._member = member

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """See bagua_core.allreduce. Raises TypeError for what has no average."""
        check_averages(tensor, op)
        communicator = self._member.communicator
        if communicator is None:
            return tensor.clone()
        if self._steps.in_step:
            return self._in_step(tensor, op)
        if communicator.global_rank in self._steps.newcomers:
            return tensor.clone()  # it takes part from its first step on
        return self.operate(tensor, op)

    def _in_step(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Part of the step: it fails with it. Once the step's reduction is in, the step is final, so a failure
        then only ends the generation, and the rank's own value comes back."""
        steps, member = self._steps, self._member
        communicator = member.communicator
        assert communicator is not None
        if steps.step_failed or member.broken:
            return tensor.clone()
        healing = communicator.global_rank in steps.plan.healing
        result = operations.neutral(tensor, op) if healing else tensor.clone()
        try:
            steps.wait(communicator.allreduce(result, ReduceOp.SUM if op is ReduceOp.AVG else op))
        except CollectiveFailed as error:
            if steps.is_reduced:
                member.break_generation(error)
            else:
                steps.reduction_failed(error)
            return tensor.clone()
        return mean_of(result, steps.plan.active_count) if op is ReduceOp.AVG else result

    def operate(self, tensor: torch.Tensor, op: ReduceOp, finishing: bool = False) -> torch.Tensor:
        """Run one collective of the log until it succeeded among the members that are left."""
        member, log = self._member, self._state.operations
        index = log.next_index
        log.is_running = True
        try:
            while True:
                recorded = log.recorded(index)
                if recorded is not None:
                    log.returned()
                    return recorded.clone()
                if member.generation is None or (finishing and member.is_closed):
                    log.returned()
                    return tensor.clone()
                try:
                    result = self._attempt(index, tensor, op)
                except CollectiveFailed as error:
                    if not member.broken:
                        member.break_generation(error)
                    member.follow(outside=True, given_up=lambda: finishing and member.is_closed)
                    continue
                log.record(result)
                log.returned()
                self._steps.operation_done(index)
                return result
        finally:
            log.is_running = False

    def _attempt(self, index: int, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        member, newcomers = self._member, self._steps.newcomers
        if member.broken:
            raise CollectiveAborted("the generation broke before")
        communicator = member.communicator
        assert communicator is not None
        members = tuple(r for r in range(communicator.world_size) if r not in newcomers)
        if len(members) == 1:
            return tensor.clone()
        if newcomers:
            communicator = member.side_communicator(members)
        operations.check_agreement(communicator, index, tensor, op, member.wait_unlearned)
        result = tensor.clone()
        member.wait_unlearned(communicator.allreduce(result, op))
        return result


def check_averages(tensor: torch.Tensor, op: ReduceOp) -> None:
    """Raises TypeError, before any peer is asked, for a dtype whose values have no average of that dtype."""
    if op is ReduceOp.AVG and tensor.dtype is torch.bool:
        raise TypeError("the average of booleans is no boolean; convert the tensor to a floating type first")


def mean_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """In place. Whole numbers are rounded towards zero, in a step as outside one and as every communicator does."""
    if total.is_floating_point() or total.is_complex():
        return total.div_(count)
    return total.div_(count, rounding_mode="trunc")
