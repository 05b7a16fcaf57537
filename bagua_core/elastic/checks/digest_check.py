"""Checks that all ranks have the same parameters, by a digest compared every so many steps.

When one differs the ranks exchange the digests they took after every step since (digest_trace.py), and the first step
that differs is named; where steps are too quick for one digest each, the few steps between which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.elastic.checks.digest_trace import Difference, DigestTrace, first_difference
from bagua_core.elastic.checks.stragglers import UNKNOWN
from bagua_core.elastic.state import flat_tensors
from bagua_core.errors import UserError

_NOT_TAKEN = -1  # digests have 63 bits


class Diverged(UserError, RuntimeError):
    """Ranks that should have equal parameters do not."""


class DigestCheck:
    """Compares the parameters' digests of all ranks. every_steps 0: never."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._last_equal_step = 0
        self._trace = DigestTrace(every_steps)

    def is_due(self, step: int) -> bool:
        return self._every_steps > 0 and step % self._every_steps == 0

    def step_done(self, parameters: Callable[[], Sequence[torch.Tensor]], step: int) -> None:
        """Records that step `step` is committed here, and no comparison is due. Takes a digest if that costs little."""
        if self._every_steps > 1:
            self._trace.step_done(parameters, step)

    def state_replaced(self, parameters: Callable[[], Sequence[torch.Tensor]], step: int) -> None:
        """Drops the digests taken so far, because a copy brought the state after `step`. Takes one of it if that costs
        little."""
        self._trace.compared()
        self.step_done(parameters, step)

    def compare(
        self,
        communicator: Communicator,
        parameters: Sequence[torch.Tensor],
        step: int,
        wait: Callable[[Pending], None],
        computing_us: int = UNKNOWN,
    ) -> tuple[int, ...]:
        """Compares the digests, and returns all ranks' computing_us, which travels along: see stragglers.py.

        Raises Diverged naming the steps and ranks; CollectiveFailed if the comparison could not be made.
        """
        own = torch.tensor(
            [flat_tensors.digest(parameters), self._last_equal_step, computing_us],
            dtype=torch.int64,
            device="cpu",
        )
        rows = torch.zeros((communicator.world_size, 3), dtype=torch.int64, device="cpu")
        wait(communicator.allgather(rows, own))
        compared = [int(v) for v in rows[:, 0]]
        if len(set(compared)) == 1:
            self._last_equal_step = step
            self._trace.compared()
            return tuple(rows[:, 2].tolist())
        taken = self._exchange_trace(communicator, step, wait)
        found = first_difference(taken, [int(v) for v in rows[:, 1]], compared, step)
        raise Diverged(_described(found, step, communicator.generation))

    def _exchange_trace(
        self, communicator: Communicator, step: int, wait: Callable[[Pending], None]
    ) -> list[dict[int, int]]:
        """Returns the digests that all ranks took since the last comparison, by global_rank.

        All ranks have found the same difference, so all come here.
        """
        steps = range(step - self._every_steps + 1, step)
        own = torch.tensor(
            [self._trace.taken.get(s, _NOT_TAKEN) for s in steps], dtype=torch.int64, device="cpu"
        )
        rows = torch.zeros((communicator.world_size, len(steps)), dtype=torch.int64, device="cpu")
        wait(communicator.allgather(rows, own))
        return [{s: v for s, v in zip(steps, row, strict=True) if v != _NOT_TAKEN} for row in rows.tolist()]


def _described(found: Difference, compared_step: int, generation: int) -> str:
    ranks = f"global ranks {list(found.odd)}"
    who = (
        f"{ranks} differ from each other, with no majority among them, in generation {generation}"
        if found.all_differ
        else f"{ranks} differ from the others in generation {generation}"
    )
    advice = "Look for randomness or rank-dependent code outside the gradients"
    if found.is_exact:
        return (
            f"parameters differ after step {found.step}, the first step that differs (compared after step "
            f"{compared_step}): {who}. {advice} in that step"
        )
    return (
        f"parameters differ after step {found.step} (they agreed after step {found.agreed_after}): {who}. "
        f"{advice}; --digest-every 1 finds the first step"
    )
