"""Defines the interface between a wrapped model and its algorithm: the calls in the course of a step.

A step: `forward_begins` once or more (micro-batches), then the hooks on the gradients, then exactly one of
`step_committed` and `step_rolled_back`. Between steps `communicator_changed` may come. Everything runs in the script's
thread. Invariant: parameters change only once the step can't fail any more (after StepReductions.reduction_done).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.trained_parameters import Candidates


class Exchange:
    """The calls that a wrapped model makes to its algorithm. Each does nothing unless the algorithm needs it."""

    synced = True
    """Whether the next backward shares anything; False under no_sync."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a backward pass began and was not finished, so that peers may wait for this rank."""
        return False

    def be_model(self, number: int) -> None:
        """Gives this exchange the number of its model among those of the engine (model_turns.py)."""

    @property
    def acts_in_forward(self) -> bool:
        """Whether the next training forward starts collectives of all members in `forward_begins`."""
        return False

    def trains(self, candidates: Candidates, choice: bytes) -> None:
        """Sets which parameters are trained, as a forward begins: of `candidates`, all parameters of the module by
        name, those with a 1 in `choice` require a gradient. Raises CannotTakeOn, FrozenWithinStep."""

    @property
    def layout_version(self) -> int:
        """A number that changes when `reduces` may answer differently."""
        return 0

    def reduces(self, parameter: torch.Tensor) -> bool | None:
        """Tells whether this exchange acts on the parameter's gradient; None: as when it was attached."""
        return None

    @property
    def reductions(self) -> int | None:
        """The number of reductions of the gradients that succeeded so far; None: not counted."""
        return None

    @property
    def has_local_gradients(self) -> bool:
        """Whether .grad holds contributions of this rank alone, of backwards since the last reduction."""
        return False

    def holds_reduced(self, parameter: torch.Tensor) -> bool:
        """Tells whether the parameter's .grad is memory in which this exchange leaves what it reduced."""
        return True

    @property
    def readiness(self) -> tuple[int, ...]:
        """The measured order of the gradients, as `retune` takes it; empty: none is measured."""
        return ()

    @property
    def bucket_times(self) -> tuple[tuple[int, float], ...]:
        """The bytes and seconds of each bucket's sum in the order of launch; empty: none is measured."""
        return ()

    def forward_begins(self) -> None:
        """Acts as a forward that computes gradients begins, in a step that has not failed."""

    def copy_begins(self) -> None:
        """Prepares for a copy of this worker's state, which is about to be read for workers that joined; they copy it
        beside the step that begins. Called before the step's first forward."""

    def put_gradient(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Makes `value` the .grad of `parameter`; see step_interface.Model."""
        parameter.grad = None if value is None else value.to(parameter.device)

    def close_round(self, communicator: Communicator | None, weight: float) -> None:
        """Begins what `step_committed` takes over: the round's local steps are done. For algorithms with rounds alone.

        communicator: None in a world of one. weight: this worker's samples over those of all members; 0 for a worker
        without any, whose own values must not count. Collectives of all members start here, in one order. Raises
        CollectiveFailed.
        """

    def at_round_begin(self) -> AbstractContextManager[None]:
        """Returns a context within which the model has the parameters with which the round under way began."""
        return nullcontext()

    def check_shards(self) -> None:
        """Checks, as a step of a deterministic job ends, that this worker's last shard of it had a backward if another
        one had. Raises NotDeterministicError."""

    def step_committed(self) -> None:
        """Acts once the step is final and the optimizer has stepped."""

    def step_rolled_back(self) -> None:
        """Acts once the step is rolled back: it did not happen."""

    def communicator_changed(self) -> None:
        """Drops everything of the old communicator: another generation is in force, or none."""

    def state_replaced(self) -> None:
        """Drops what belongs to this worker's model beside `travelling`: the model was copied from another worker or a
        checkpoint, or is about to be."""

    def retune(self, operation: BucketOperation, bucket_cap_bytes: int, order: Sequence[int]) -> None:
        """Changes the operation that sums and the buckets, between two steps and on all ranks alike.

        bucket_cap_bytes: a bucket is closed once it holds as many. order: the attached parameters by place, in the
        order in which their gradients are ready; one of another length counts as none, which is the reverse of the
        registration. `communicator_changed` follows.
        """

    def travelling(self) -> Mapping[str, torch.Tensor]:
        """Returns further tensors that belong to the job's state and are alike on all ranks that hold it: they are
        checkpointed, and a rank that heals gets them. Every call returns the same names and the same tensor objects."""
        return {}

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes the replicas equal if they are not: training is over and every member calls this.

        average: the mean over the members, which survives losses. Called outside steps.
        """

    def close(self) -> None:
        """Removes all hooks."""
