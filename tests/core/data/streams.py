"""Streams for tests: each item is its place in the epoch, with a random fraction drawn while it is read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Places(IterableDataset[float]):
    """Without a state. Epochs differ in length: `length` items, and one more in every second one."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.drawn = 0  # items read, in all

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def length_of(self, epoch: int) -> int:
        return self.length + epoch % 2

    def item(self, place: int) -> float:
        self.drawn += 1
        return place + random.random() / 2

    def __iter__(self) -> Iterator[float]:
        return (self.item(place) for place in range(self.length_of(self.epoch)))


class PlacesWithState(Places):
    """With a position of its own, which an iteration that is left leaves where it is."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._at = 0

    def __iter__(self) -> Iterator[float]:
        while self._at < self.length_of(self.epoch):
            self._at += 1
            yield self.item(self._at - 1)
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


class ForgetfulPlaces(PlacesWithState):
    """Loses an item where it continues, as a buffer that shuffles does."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"] + (1 if state["at"] else 0)


class OwnGenerator(PlacesWithState):
    """Goes on with a generator of its own from epoch to epoch, as samplers of torchdata do."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._numbers = random.Random(1)

    def item(self, place: int) -> float:
        return place + self._numbers.random() / 2

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "numbers": self._numbers.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]
        self._numbers.setstate(state["numbers"])
