"""Implements QAdam: Adam whose workers exchange momentum in eight bits or one, with error feedback, after a warm-up.

This is 1-bit Adam (arXiv 2102.02888), as in Bagua (arXiv 2107.01499). In the warm-up gradients are averaged in full
precision and the optimizer is Adam. After it the second moment is frozen, so that steps are linear in the momentum, and
what workers exchange can be compressed (momentum_sum.py).

Commits and heals as plain data parallelism does, and all ranks hold the same bits after each step. Moments belong to
the optimizer's state, so a worker that joins copies them. What a worker has not sent yet stays with it, and is lost
with it; one that copied the state begins with none.
"""

from __future__ import annotations

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.momentum_sum import FORMS, MomentumSum
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.communication.communicator import Lane
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import operation_queue_of
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.topology.routes import lanes_for


class QAdam(Algorithm):
    """Averages gradients during the optimizer's warm-up, and sums compressed momentum after it.

    optimizer: the one of the model's parameters; None: the only QAdamOptimizer that the model is given.
    hierarchical: workers of one node sum up uncompressed first, and only one of each crosses the network.
    bits: 8 or 1.
    Raises ValueError.
    """

    name = "qadam"

    def __init__(
        self, optimizer: QAdamOptimizer | None = None, hierarchical: bool = True, bits: int = 8
    ) -> None:
        if bits not in FORMS:
            raise ValueError(f"QAdam: bits={bits!r}; use 8 or 1")
        self.optimizer = optimizer
        self.hierarchical = hierarchical
        self.bits = bits

    @property
    def lanes(self) -> frozenset[Lane]:
        return lanes_for(self.hierarchical)

    @property
    def described(self) -> str:
        return f"{self.name}(hierarchical={self.hierarchical}, bits={self.bits})"

    def operation(self, attachment: Attachment) -> BucketOperation:
        """Returns the operation that runs on each full bucket. Raises ValueError if the model's QAdamOptimizer was not
        given, or lacks some of its parameters."""
        return MomentumSum(
            operation_queue_of(attachment.engine),
            FORMS[self.bits],
            self.hierarchical,
            self._optimizer_of(attachment),
            attachment.parameters,
            attachment.engine,
        )

    def attach(self, attachment: Attachment) -> Exchange:
        return Reducer(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            operation=self.operation(attachment),
            find_unused_parameters=attachment.find_unused_parameters,
        )

    def _optimizer_of(self, attachment: Attachment) -> QAdamOptimizer:
        given = [o for o in attachment.optimizers if isinstance(o, QAdamOptimizer)]
        if self.optimizer is not None and not any(o is self.optimizer for o in given):
            raise ValueError("QAdam's optimizer is none of the model's; pass optimizers=[optimizer] too")
        if self.optimizer is None and len(given) != 1:
            raise ValueError(
                f"QAdam needs the model's QAdamOptimizer, and {len(given)} were given; pass optimizers=[optimizer]"
            )
        optimizer = self.optimizer or given[0]
        known = {p for group in optimizer.param_groups for p in group["params"]}
        strange = sum(p not in known for p in attachment.parameters)
        if strange:
            raise ValueError(
                f"{strange} of the model's parameters are not the QAdamOptimizer's; give it all of them"
            )
        return optimizer
