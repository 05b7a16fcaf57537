"""What is an algorithm? Something that puts a reducer on a model's parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch

from bagua_core.communication.reducer import Reducer
from bagua_core.elastic.step_interface import StepEngine


class Algorithm(ABC):
    name: ClassVar[str]

    @abstractmethod
    def attach(
        self, parameters: Iterable[torch.nn.Parameter], engine: StepEngine, bucket_cap_bytes: int
    ) -> Reducer:
        """Begin to act on the gradients of `parameters`, given in registration order."""
