"""Defines the engine as the script's collectives see it."""

from __future__ import annotations

from typing import Protocol

from bagua_core.communication.step_interface import Rounds, StepReductions


class Steps(StepReductions, Protocol):
    """Defines the calls of a script's collective to the engine."""

    @property
    def rounds(self) -> Rounds | None:
        """The leases of samples, where the round is the unit of commit; None elsewhere."""

    @property
    def virtual_shards(self) -> int:
        """The most virtual shards of a batch in a deterministic job; 0 in any other. See StepEngine."""

    @property
    def newcomers(self) -> frozenset[int]:
        """Ranks that copy the state beside the first step of the generation, and take part in nothing before it."""

    def replica_place(self) -> tuple[int, int]:
        """Returns the rank of this worker's replica and the number of replicas, as the script sees them."""

    def joiner_left_out(self) -> None:
        """Called when a collective of the step has left out what a worker in its first step brings."""

    def operation_done(self, index: int) -> None:
        """Commits collective `index` after the last step, which all members but joiners completed."""
