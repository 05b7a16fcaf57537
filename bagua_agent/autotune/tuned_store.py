"""Reads, writes and removes the records of tuned_records.py in etcd. Each call waits for the store."""

from __future__ import annotations

from bagua_agent.autotune.tuned_records import PREFIX, Tuned, TunedFor, beyond_bound, read_all
from bagua_agent.etcd.client import Store


def read_tuned(store: Store) -> tuple[dict[str, Tuned], list[str]]:
    """Returns the records by key, and complaints about those that can't be read. Raises InfrastructureLost."""
    found, _ = store.get_prefix(PREFIX)
    return read_all(found)


def keep_tuned(store: Store, record: Tuned) -> None:
    """Writes the record, and removes the oldest beyond the bound. May be done more than once. Raises
    InfrastructureLost."""
    store.put(record.place.key, record.encode())
    found, _ = store.get_prefix(PREFIX)
    for key in beyond_bound(found, record.place.key):
        store.delete(key)


def forget_tuned(store: Store, model: str) -> int:
    """Removes the records of a model and returns how many there were. model: see tuned_records.model_of. Raises
    InfrastructureLost."""
    return store.delete_prefix(TunedFor(model, "", "").folder) if model else 0
