"""etcd has lost what agents wrote of a round: an agent that waits for it ends by its limit."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import DistStoreError

from bagua_torchrun.agents_store import AgentsStore
from bagua_torchrun.watched_handler import ROLE_INFO, WatchedHandler


@pytest.mark.parametrize("lost", [frozenset(), frozenset({"other"})], ids=["none is lost", "another is lost"])
def test_an_agent_without_its_own_value_waits_no_longer_than_its_limit(lost: frozenset[str]) -> None:
    keys = SimpleNamespace(store=SimpleNamespace(get=lambda key: None))
    store = AgentsStore(cast(Any, keys), "prefix/")
    store.set_timeout(timedelta(seconds=0.5))
    handler: Any = WatchedHandler.__new__(WatchedHandler)
    handler._world, handler._this_node = {"own": 0, "other": 1}, "own"
    handler._round_store = store
    handler.is_closed = lambda: False
    handler._lost = lambda: lost
    store.while_waiting = handler._while_waiting
    with pytest.raises(DistStoreError):
        store.wait([f"{ROLE_INFO}0", f"{ROLE_INFO}1"])
