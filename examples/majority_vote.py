"""A custom algorithm: every worker votes on the sign of each gradient element, and the majority decides.

One byte an element travels instead of four. `train_with_majority_vote.py` uses it; docs/algorithms.md explains it.
"""

import torch

from bagua_core.algorithms import Algorithm, Attachment
from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import Job, OperationQueue, operation_queue_of
from bagua_core.communication.reduction.reducer import Reducer

MOST_VOTES = 127  # that an int8 counts


class MajorityVote(Algorithm):
    """The gradient that optimizers see is -1, 0 (a tie, or no worker has one) or 1."""

    name = "majority_vote"

    def attach(self, attachment: Attachment) -> Exchange:
        vote = Vote(operation_queue_of(attachment.engine))
        return Reducer(attachment.parameters, attachment.engine, attachment.bucket_cap_bytes, operation=vote)


class Vote(BucketOperation):
    """What becomes of a bucket: several steps in a row, so they run in the operation queue's thread."""

    acts_alone = True  # in a world of one the optimizer sees signs too

    def __init__(self, operation_queue: OperationQueue) -> None:
        self._operations = operation_queue

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if communicator is None:
            bucket.flat.sign_()
            return DonePending()
        if communicator.world_size > MOST_VOTES:
            raise ValueError(f"{communicator.world_size} workers; at most {MOST_VOTES} can vote")
        return self._operations.launch(communicator, self._vote(communicator, bucket.flat))

    def _vote(self, communicator: Communicator, flat: torch.Tensor) -> Job:
        votes = flat.sign().to(torch.int8)  # a worker with a share of 0 has zeros, so it abstains
        yield communicator.allreduce(votes)
        flat.copy_(votes.sign_())
