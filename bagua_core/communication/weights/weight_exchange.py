"""Exchanges the weights of several ranks within a step: when it begins, and when its result counts.

Owns the order of calls shared by all algorithms whose ranks keep their gradients and exchange weights: `begin` once a
step, at the first forward whose backward is shared; then the step's vote (the switch pair, after `before_vote`); then
exactly one of `take_over` and `undo`. Which weights go where is the algorithm's. Invariants: the vote is an allreduce,
so where it succeeds every rank's exchange has succeeded before; a rank whose vote fails while another's succeeds heals
from that one. What is taken over stays, also if the step fails later, behind its vote: the engine moves the name of
this rank's state, so that a rank that missed the vote is behind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import LocalMean
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import StepPlan, StepReductions
from bagua_core.communication.weights.weight_buckets import make_equal

SWAP_TAG = 7101  # and one more for each further bucket


class _Vote(LocalMean):
    """The operation of a weight exchange: gradients stay on their rank, and the vote alone is reduced."""

    def __init__(self) -> None:
        self.exchange: WeightExchange | None = None

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert self.exchange is not None
        self.exchange.step_weight = weight
        return super().launch(communicator, bucket, number, weight)

    def before_vote(self, communicator: Communicator) -> None:
        assert self.exchange is not None
        self.exchange.before_vote()

    def reduced(self) -> None:
        assert self.exchange is not None
        self.exchange.reduced()


class WeightExchange(Reducer):
    """A reducer that exchanges weights: each rank trains on the mean gradient of its own samples. Raises ValueError if
    there is nothing to train."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        engine: StepReductions,
        bucket_cap_bytes: int,
        find_unused_parameters: bool,
    ) -> None:
        vote = _Vote()
        super().__init__(
            parameters,
            engine,
            bucket_cap_bytes,
            operation=vote,
            find_unused_parameters=find_unused_parameters,
        )
        vote.exchange = self
        self.step_weight = 0.0
        """In `take_over`: the part of the global batch that this rank has used in the step."""
        self._has_begun = False  # in this step
        self._is_open = False  # begun, and neither taken over nor undone

    # -- what an algorithm does

    @abstractmethod
    def begin(self, communicator: Communicator | None, plan: StepPlan) -> None:
        """Begins the exchange, just before a step's first shared forward runs. communicator: None in a world of one.

        What it changes is provisional. Collectives of all ranks start here in one order. Raises CollectiveFailed.
        """

    def before_vote(self) -> None:
        """Waits for what must have arrived if the step is to succeed. Raises CollectiveFailed."""

    @abstractmethod
    def take_over(self) -> bool:
        """Takes over the result: the step is final, and the optimizer has not stepped. `before_vote` may be missing: if
        no backward of this model took part in the step, whose forward began. Returns whether anything changed that
        belongs to the job's state: the weights, or what `travelling` names."""

    @abstractmethod
    def undo(self) -> None:
        """Undoes the exchange: the step did not happen, or `begin` failed."""

    # -- Exchange

    @property
    def acts_in_forward(self) -> bool:
        return self.synced and not self._has_begun

    def forward_begins(self) -> None:
        if self._has_begun or not self.synced:
            return
        self._has_begun = self._is_open = True
        communicator = self._engine.communicator()
        if communicator is not None and communicator.world_size == 1:
            communicator = None
        self.step_weight = 1.0 if communicator is None else 0.0  # a world of one launches nothing
        try:
            with torch.no_grad():
                self.begin(communicator, self._engine.plan)
        except CollectiveFailed as error:
            self.is_final(happened=False)
            self._engine.reduction_failed(error)

    def step_committed(self) -> None:
        super().step_committed()
        self.is_final(happened=True)
        self._has_begun = False

    def step_rolled_back(self) -> None:
        super().step_rolled_back()
        self.is_final(happened=False)
        self._has_begun = False

    def communicator_changed(self) -> None:
        super().communicator_changed()
        self.is_final(happened=False)
        self._has_begun = False

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        make_equal(self._parameters, average)

    def reduced(self) -> None:
        """Takes over the exchange, because the step's vote succeeded."""
        if self.is_final(happened=True):
            self._engine.exchange_is_final()

    def is_final(self, happened: bool) -> bool:
        """Closes this step's exchange, which counts from now on, or never will. Returns whether that changed the job's
        state."""
        if not self._is_open:
            return False
        self._is_open = False
        with torch.no_grad():
            if happened:
                return self.take_over()
            self.undo()
        return False
