"""Do all ranks still have the same parameters? A digest, compared every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.elastic import state_codec


class Diverged(RuntimeError):
    """Ranks that should have equal parameters do not."""


class DigestCheck:
    """every_steps 0: never."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._last_equal_step = 0

    def is_due(self, step: int) -> bool:
        return self._every_steps > 0 and step % self._every_steps == 0

    def compare(
        self,
        communicator: Communicator,
        parameters: Sequence[torch.Tensor],
        step: int,
        wait: Callable[[Pending], None],
    ) -> None:
        """Raises Diverged naming the steps and ranks; CollectiveFailed if the comparison could not be made."""
        own = torch.tensor([state_codec.digest(parameters)], dtype=torch.int64)
        digests = torch.zeros((communicator.world_size, 1), dtype=torch.int64)
        wait(communicator.allgather(digests, own))
        values = [int(v) for v in digests.flatten()]
        if len(set(values)) == 1:
            self._last_equal_step = step
            return
        usual = max(set(values), key=values.count)
        odd = [r for r, v in enumerate(values) if v != usual]
        raise Diverged(
            f"parameters differ after step {step} (they agreed after step {self._last_equal_step}): global ranks "
            f"{odd} differ from the others in generation {communicator.generation}. Look for randomness or "
            "rank-dependent code outside the gradients; --digest-every 1 finds the first step"
        )
