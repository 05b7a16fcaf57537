"""Copies the mappings and sets of a picture once for each batch of events, not once for each event.

A copy for each event would cost the leader of a large job the square of its nodes whenever all of them join, commit or
report a loss. The picture from before the batch is never changed. Pure as seen from outside a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TypeVar

V = TypeVar("V")


class Batch:
    """The copies that belong to one batch of events. A later event of the batch changes them in place."""

    def __init__(self) -> None:
        # by id; held here, so that no other object gets the id meanwhile
        self._own: dict[int, object] = {}

    def having(self, mapping: Mapping[str, V], key: str, value: V) -> Mapping[str, V]:
        """Returns the mapping with that value at `key`."""
        own = self._mapping(mapping)
        own[key] = value
        return own

    def without(self, mapping: Mapping[str, V], key: str) -> Mapping[str, V]:
        """Returns the mapping without `key`."""
        if key not in mapping:
            return mapping
        own = self._mapping(mapping)
        del own[key]
        return own

    def including(self, items: Set[str], item: str) -> Set[str]:
        """Returns the set with that item."""
        own = self._own.get(id(items))
        if not isinstance(own, set):
            own = copied_set(items)
            self._own[id(own)] = own
        own.add(item)
        return own

    def _mapping(self, mapping: Mapping[str, V]) -> dict[str, V]:
        own = self._own.get(id(mapping))
        if not isinstance(own, dict):
            own = copied(mapping)
            self._own[id(own)] = own
        return own


def copied(mapping: Mapping[str, V]) -> dict[str, V]:
    """Copies a mapping of the picture; each batch does so at most once for each of them."""
    return dict(mapping)


def copied_set(items: Set[str]) -> set[str]:
    """Copies a set of the picture, as `copied` does a mapping."""
    return set(items)
