"""Holds the desired keys of a process beside the keys that etcd contains as far as the process knows.

The state of LeasedKeys (leased_keys.py), and the decisions on what to write and remove. Has no lock, no connection and
no clock. `lease_id` is the lease on which a key was found or written; revisions are etcd's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from bagua_agent.etcd.client import KeyValue


class LeasedKeyTable:
    """The desired, written, created and removed keys of one process on its current lease.

    Not thread-safe: LeasedKeys holds its lock around each call.
    """

    def __init__(self) -> None:
        # keys to delete from the lease
        self.removals: set[str] = set()
        # desired keys, with their values
        self._desired: dict[str, bytes] = {}
        # desired keys that are on the current lease, with the values that were written or read last
        self._written: dict[str, bytes] = {}
        # mod revision of the key as last seen; no entry: the key is absent, or another owner's
        self._mod_revision: dict[str, int] = {}
        # keys that `put_if_absent` created or found on the lease: lease and create revision
        self._created: dict[str, tuple[int, int]] = {}
        # keys that a call of `put_if_absent` in progress may create
        self._in_creation: set[str] = set()
        # by desired key: whether a key found there belongs to another owner
        self._is_anothers: dict[str, Callable[[KeyValue], bool]] = {}
        # desired keys that belonged to another owner when last read; not written before the next `compare` or lease
        self._left_to_others: set[str] = set()

    # ---- what the owner wants

    def put(self, key: str, value: bytes, is_anothers: Callable[[KeyValue], bool]) -> None:
        """Makes `key` desired with `value`."""
        self.removals.discard(key)
        self._created.pop(key, None)
        self._desired[key] = value
        self._is_anothers[key] = is_anothers

    def remove(self, key: str) -> None:
        """Makes `key` undesired and queues its removal."""
        self._desired.pop(key, None)
        self._written.pop(key, None)
        self._created.pop(key, None)
        self._left_to_others.discard(key)
        self._is_anothers.pop(key, None)
        self.removals.add(key)

    def creation_begins(self, key: str) -> None:
        """Notes that `put_if_absent` begins: `key` may appear on the lease, and is not removed meanwhile."""
        self._in_creation.add(key)

    def creation_ends(self, key: str) -> None:
        """Notes that `put_if_absent` ends, with any outcome. An entry of an earlier creation stays: it may still be
        true."""
        self._in_creation.discard(key)

    def created(self, key: str, lease_id: int, create_revision: int) -> None:
        """Notes that `put_if_absent` created `key`, or found it on the lease."""
        self._created[key] = (lease_id, create_revision)

    def belongs_to_another(self, key: str) -> None:
        """Notes that `put_if_absent` found `key` on no lease of this process."""
        self._created.pop(key, None)

    # ---- what to do

    @property
    def all_done(self) -> bool:
        """Whether nothing is left to write or remove."""
        return not self.removals and self._desired == self._written

    def to_write(self) -> dict[str, bytes]:
        """Returns the desired keys that are absent or have another value, without those of other owners."""
        return {
            key: value
            for key, value in self._desired.items()
            if self._written.get(key) != value and key not in self._left_to_others
        }

    def mod_revision(self, key: str) -> int:
        """Returns the mod revision of the key as last seen; 0 if absent or another owner's. A write of the key compares
        it."""
        return self._mod_revision.get(key, 0)

    @property
    def written_keys(self) -> list[str]:
        """The desired keys that are on the current lease, with these values or others."""
        return sorted(self._written)

    @property
    def created_keys(self) -> dict[str, tuple[int, int]]:
        """The lease and create revision of the keys that `put_if_absent` created or found on the lease."""
        return dict(self._created)

    # ---- what was read or written in etcd

    def written(self, key: str, value: bytes, revision: int, *, is_current: bool) -> None:
        """Notes that `key` is on a lease of this process. is_current: on the current one."""
        self._mod_revision[key] = revision
        if is_current and key in self._desired:
            self._written[key] = value
        # else removed meanwhile: its removal is queued

    def not_on_lease(self, key: str, found: KeyValue | None) -> None:
        """Notes that `key` is absent (None), or was found on another lease or on none."""
        self._mod_revision.pop(key, None)
        if found is None:
            return
        if key in self._desired and self._is_anothers[key](found):
            # without a mod revision: it may be written only once the other owner's key is absent
            self._left_to_others.add(key)
            self._written.pop(key, None)
        else:
            self._mod_revision[key] = found.mod_revision

    def removed(self, key: str) -> None:
        """Notes that `key` is no longer on the lease."""
        self.removals.discard(key)
        self._mod_revision.pop(key, None)

    def compare(
        self,
        lease_id: int,
        found: Set[str],
        created_before: Mapping[str, tuple[int, int]],
        create_revisions: Mapping[str, int],
    ) -> None:
        """Queues the differences between the keys `found` on the lease and those that should be there.

        created_before: `created_keys` before the lease was read. create_revisions: of those of them that were found.
        """
        # The key was created, lost, and created again by a later call that got no answer: that one is not ours.
        for key, revision in create_revisions.items():
            if self._created.get(key) == created_before[key] != (lease_id, revision):
                del self._created[key]
        for key in self._written.keys() - found:
            del self._written[key]
            self._mod_revision.pop(key, None)
        self.removals |= found - self._desired.keys() - self._created.keys() - self._in_creation
        self._left_to_others.clear()

    def lease_lost(self) -> None:
        """Notes that the lease has ended in etcd, and all keys on it are gone."""
        self._written.clear()
        self._created.clear()
        self._left_to_others.clear()
        self._mod_revision.clear()
        self.removals.clear()
