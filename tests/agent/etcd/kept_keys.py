"""Leased keys of the tests, and what stores hold of them."""

from __future__ import annotations

from collections.abc import Callable

from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.leased_keys import LeasedKeys, LeaseEvent
from tests.agent.etcd.conftest import Recorder

MakeStore = Callable[..., Store]
Keep = Callable[..., tuple[LeasedKeys, Recorder[LeaseEvent]]]


def read(store: Store, key: str) -> KeyValue:
    found = store.get(key)
    assert found is not None, key
    return found


def values(store: Store) -> dict[str, bytes]:
    return {kv.key: kv.value for kv in store.get_prefix("/")[0]}


def kinds(events: list[LeaseEvent]) -> list[type]:
    return [type(e) for e in events]
