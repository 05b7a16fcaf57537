"""Decodes the record in the store, whether it is stored whole or in parts."""

from __future__ import annotations

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.record_parts import Head, head_of, joined, unpacked


def packed_parts(store: Store, keys: JobKeys, head: Head, timeout_s: float | None = None) -> bytes | None:
    """Returns the packed parts of a record; None if some are gone, since a newer record has replaced them. Raises
    StoreUnavailable."""
    found = {kv.key: kv.value for kv in store.get_prefix(keys.record_folder(head.folder), timeout_s)[0]}
    return joined([found.get(key) for key in head.keys(keys)])


def whole_value(store: Store, keys: JobKeys, value: bytes) -> bytes | None:
    """Returns `value`, or the whole record where it is a head; None if that was replaced meanwhile. Raises
    StoreUnavailable."""
    head = head_of(value)
    if head is None:
        return value
    packed = packed_parts(store, keys, head)
    return None if packed is None else unpacked(head, packed)
