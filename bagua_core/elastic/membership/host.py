"""The interface of a worker's membership to the engine, which holds the state and makes the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from bagua_contract import membership_pb2
from bagua_contract.records import Generation
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import entry


class Host(Protocol):
    """The calls of a member to the engine."""

    def info(self) -> entry.Info: ...

    def fingerprint(self) -> Mapping[str, str]: ...

    def take_part(self, generation: Generation, plan: HealPlan, infos: list[entry.Info]) -> None:
        """Heals as planned and becomes part of `generation`. Raises CollectiveFailed."""

    def stepped_out(self, left: Generation, *, keeps_state: bool, together: bool) -> None:
        """Takes this worker out of `left`, since no generation in force lists it. Unless keeps_state, what it holds is
        no longer the job's. together: all members of `left` do so after the same step."""

    def before_leaving(self) -> membership_pb2.LastCheckpoint | None:
        """Finishes what is to be saved, within the time that the agent gave. Returns None if no state of the job is
        held here."""

    def reach(self, point: str) -> None: ...
