"""Plain data parallelism: every step's gradient is the mean over all samples of the global batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua_core.algorithms.algorithm import Algorithm
from bagua_core.communication.reducer import Reducer
from bagua_core.elastic.step_interface import StepEngine


class GradientAllreduce(Algorithm):
    name = "gradient_allreduce"

    def attach(
        self, parameters: Iterable[torch.nn.Parameter], engine: StepEngine, bucket_cap_bytes: int
    ) -> Reducer:
        return Reducer(parameters, engine, bucket_cap_bytes)
