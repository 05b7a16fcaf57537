"""Plain data parallelism: every step's gradient is the mean over all samples of the global batch."""

from __future__ import annotations

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.communication.exchange import Exchange
from bagua_core.communication.reducer import Reducer


class GradientAllreduce(Algorithm):
    name = "gradient_allreduce"

    def attach(self, attachment: Attachment) -> Exchange:
        return Reducer(attachment.parameters, attachment.engine, attachment.bucket_cap_bytes)
