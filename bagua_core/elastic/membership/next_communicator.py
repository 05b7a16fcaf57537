"""Holds the communicator that is built for a coming generation while the one in force works on.

The session's thread begins to build as soon as it hears of a generation; the script's thread enters it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bagua_contract.records import Generation
from bagua_core.elastic.membership.following import is_superseded
from bagua_core.elastic.membership.rendezvous import Building, Rendezvous


class NextCommunicator:
    """Holds the communicator of a coming generation while it is built. Call `supersede`, `start` and `forget` under
    `changed`. begins(number): called before the first connection."""

    def __init__(
        self, rendezvous: Rendezvous, changed: threading.Condition, begins: Callable[[int], None]
    ) -> None:
        self._rendezvous = rendezvous
        self._changed = changed
        self._begins = begins
        self.building: Building | None = None

    def is_built_for(self, number: int) -> bool:
        """Tells whether every member is connected for generation `number`, so that this one can enter. Called from any
        thread."""
        building = self.building
        return (
            building is not None
            and building.generation.number == number
            and (building.done or building.is_connected)
            and building.error is None
        )

    def of(self, generation: Generation, *, newcomer: bool) -> Building | None:
        """Returns the building of `generation`; None if one for a generation that supersedes this one is under way.
        That one is not begun anew, for peers have read where it listens, and connect to it once."""
        with self._changed:
            building = self.building
            if building is not None and is_superseded(generation, building.generation, newcomer=newcomer):
                return None
            if building is not None and building.generation.number != generation.number:
                building.abandon(f"generation {generation.number} takes its place")
                self.building = None
            return self.start(generation)

    def start(self, generation: Generation) -> Building:
        """Begins the building for `generation`, unless there is one already, and returns it."""
        if self.building is None:
            self._begins(generation.number)
            self.building = self._rendezvous.start(generation)
        return self.building

    def supersede(self, newest: Generation, is_free: Callable[[int], bool]) -> None:
        """Gives up what `newest` ends. is_free(number): this worker may leave that generation out."""
        building = self.building
        if building is None:
            return
        if is_superseded(building.generation, newest, newcomer=is_free(building.generation.number)):
            building.abandon(f"generation {newest.number} supersedes it")
            self.building = None

    def forget(self, number: int) -> None:
        """Forgets the building of generation `number`, which was entered, or failed. A newer one, begun meanwhile,
        stays: peers connect to it."""
        if self.building is not None and self.building.generation.number <= number:
            self.building = None
