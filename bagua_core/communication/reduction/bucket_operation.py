"""Defines the operation on a full bucket between backward and optimizer: the sum over the job, or an algorithm's own.

Owns the interface and the plain sum. Invariants that every operation keeps: all ranks launch the same buckets in the
same order; a failed step leaves nothing of it in the operation, so whatever it remembers from step to step changes in
`reduced` and not before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.bucket_buffer import Bucket


class BucketOperation(ABC):
    """The base class of what happens to a full bucket. A subclass defines `launch`, and of the rest what it needs."""

    carries_pair: ClassVar[bool] = False
    """Whether `launch` sums the whole bucket, the switch pair at its end included, exactly over all ranks. If False the
    reducer sends the pair in a message of its own. A subclass that defines `launch` has False unless it says True
    itself: what is true of the base's `launch` says nothing of the subclass's."""

    takes_new_buckets: ClassVar[bool] = False
    """Whether the reducer may lay out other buckets between two steps, so that parameters can be unfrozen. As with
    `carries_pair`, a subclass that defines `launch` has False unless it says True itself."""

    acts_alone: ClassVar[bool] = False
    """Whether a world of one needs `launch` too (communicator None): the gradient itself is changed."""

    starts_at_once: ClassVar[bool] = False
    """Whether `launch` has started all its collectives when it returns, so that others may be started behind them from
    the script's thread. Else they run in the operation queue's thread, and the script's starts none before they are
    done."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "launch" in vars(cls):
            for name in ("carries_pair", "takes_new_buckets"):
                if name not in vars(cls):
                    setattr(cls, name, False)

    @property
    def keeps_own(self) -> bool:
        """Whether `launch` leaves this rank's own mean gradient in a bucket, and not one of all ranks."""
        return False

    @property
    def may_keep_own(self) -> bool:
        """Whether `keeps_own` may be True in some step."""
        return type(self).keeps_own is not BucketOperation.keeps_own

    @abstractmethod
    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        """Begins the operation on bucket `number`, full with the sum of weight times gradient over this rank's
        micro-batches.

        weight: of all this rank's micro-batches of the step, 0 for one that heals; the weights of all ranks sum to 1.
        Once done the bucket holds what the optimizer is to see as the gradient. Must not block for a peer.
        """

    def before_vote(self, communicator: Communicator) -> None:  # noqa: B027 (most have nothing to wait for)
        """Waits, once all buckets are done, for anything else that decides whether the step succeeds. Raises
        CollectiveFailed."""

    def discard(self, number: int, elements: Sequence[slice]) -> None:  # noqa: B027
        """Notes that no optimizer sees what `launch` left in these elements of bucket `number`. Called before
        `reduced`, at most once for a bucket."""

    def reduced(self) -> None:  # noqa: B027
        """Takes over what the next step builds on: the step is final on this rank. Not called in a step that failed."""

    def step_committed(self) -> None:  # noqa: B027
        """Notes that a step is committed, with or without a reduction of these buckets. Called between steps."""

    def failed(self) -> None:  # noqa: B027
        """Forgets what the step began: it did not happen. Operations that were given up may still write into buffers
        handed to them, so these must not be used again."""

    def communicator_changed(self) -> None:  # noqa: B027
        """Notes that another generation, or none, is in force. Called between steps."""


class Sum(BucketOperation):
    """The operation that gives every rank the sum of all ranks' buckets: the mean gradient, since weights sum to 1."""

    carries_pair = True
    takes_new_buckets = True
    starts_at_once = True

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        assert communicator is not None
        return communicator.allreduce(bucket.reducible)


class LocalMean(BucketOperation):
    """The operation that leaves every rank the mean gradient of its own samples; ranks share something else, such as
    weights."""

    @property
    def keeps_own(self) -> bool:
        return True

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if weight not in (0.0, 1.0):
            bucket.flat.div_(weight)
        return DonePending()
