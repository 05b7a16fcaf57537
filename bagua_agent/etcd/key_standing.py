"""What the keys of a process should hold, and what they hold in the store as far as it knows.

The state and the arithmetic of LeasedKeys (leased_keys.py): no lock, no store, no clock. `lease_id` is the lease on
which a key was found or written; `revision` is etcd's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from bagua_agent.etcd.client import KeyValue


class KeyStanding:
    def __init__(self) -> None:
        self.removals: set[str] = set()
        self._desired: dict[str, bytes] = {}
        self._standing: dict[str, bytes] = {}  # as we wrote it or read it, on this lease
        # mod revision of a key as last seen; missing means "no such key"
        self._known_revision: dict[str, int] = {}
        self._held: dict[str, tuple[int, int]] = {}  # won by an attempt: lease and create revision
        self._tried: set[str] = set()  # by an attempt under way
        self._is_anothers: dict[str, Callable[[KeyValue], bool]] = {}
        self._left_to_others: set[str] = set()  # desired keys that another owner has, as last seen

    # ---- what the owner wants

    def put(self, key: str, value: bytes, is_anothers: Callable[[KeyValue], bool]) -> None:
        self.removals.discard(key)
        self._held.pop(key, None)
        self._desired[key] = value
        self._is_anothers[key] = is_anothers

    def remove(self, key: str) -> None:
        self._desired.pop(key, None)
        self._standing.pop(key, None)
        self._held.pop(key, None)
        self._left_to_others.discard(key)
        self._is_anothers.pop(key, None)
        self.removals.add(key)

    def attempt_begins(self, key: str) -> None:
        """To create `key` unless it is there."""
        self._tried.add(key)

    def attempt_ends(self, key: str) -> None:
        """What was held before may be held still."""
        self._tried.discard(key)

    def won(self, key: str, lease_id: int, create_revision: int) -> None:
        self._held[key] = (lease_id, create_revision)

    def not_won(self, key: str) -> None:
        """Another process has `key`."""
        self._held.pop(key, None)

    # ---- what is to be done

    @property
    def all_done(self) -> bool:
        return not self.removals and self._desired == self._standing

    def to_write(self) -> dict[str, bytes]:
        return {
            key: value
            for key, value in self._desired.items()
            if self._standing.get(key) != value and key not in self._left_to_others
        }

    def known_revision(self, key: str) -> int:
        """That a write of `key` compares; 0: no such key."""
        return self._known_revision.get(key, 0)

    @property
    def held(self) -> dict[str, tuple[int, int]]:
        """Lease and create revision of the keys that attempts have won."""
        return dict(self._held)

    # ---- what was seen in the store

    def written(self, key: str, value: bytes, revision: int, *, is_current: bool) -> None:
        """is_current: on the lease that counts now."""
        self._known_revision[key] = revision
        if is_current and key in self._desired:
            self._standing[key] = value
        # else removed meanwhile: its removal is queued

    def not_ours(self, key: str, found: KeyValue | None) -> None:
        """`key` is not there, or on no lease of this process."""
        self._known_revision.pop(key, None)
        if found is None:
            return
        if key in self._desired and self._is_anothers[key](found):
            # what is known stays "no such key": it may be written once gone
            self._left_to_others.add(key)
            self._standing.pop(key, None)
        else:
            self._known_revision[key] = found.mod_revision

    def removed(self, key: str) -> None:
        self.removals.discard(key)
        self._known_revision.pop(key, None)

    def compare(
        self,
        lease_id: int,
        found: Set[str],
        held: Mapping[str, tuple[int, int]],
        created: Mapping[str, int],
    ) -> None:
        """Queue the difference between the keys `found` on the lease and what should be there.

        held: before the look. created: create revisions of those of them that are there.
        """
        # a key that was won, was lost, and that a later attempt without an answer created again is none of ours
        for key, revision in created.items():
            if self._held.get(key) == held[key] != (lease_id, revision):
                del self._held[key]
        for key in self._standing.keys() - found:
            del self._standing[key]
            self._known_revision.pop(key, None)
        self.removals |= found - self._desired.keys() - self._held.keys() - self._tried
        self._left_to_others.clear()

    def lease_lost(self) -> None:
        """Everything on it is gone."""
        self._standing.clear()
        self._held.clear()
        self._left_to_others.clear()
        self._known_revision.clear()
        self.removals.clear()
