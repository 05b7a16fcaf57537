"""Provides values in Redis by key, under the original's name and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua_core.cache.cache_loader import CacheLoader
from bagua_core.cache.cache_plan import plan
from bagua_core.torch_api.contrib.utils.store import Store

__all__ = ["RedisStore"]


class RedisStore(Store):
    """Holds values by key in Redis, sharded over `hosts`.

        store = RedisStore(hosts=[{"host": "10.0.0.5", "port": "6379"}])
        store.set("a", tensor)
        store.get("a")          # None where there is nothing, or its server is lost

    hosts None: a server is started on this node, for the processes of the job here. cluster_mode False: each node uses
    one of the hosts. capacity_per_node: bytes of a server started here, which refuses further values when it is full.
    Values are CacheLoader's. A lost or full server is reported once and raises nothing.
    Raises CacheOptionError and MissingPartError when it is made.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any] | str] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int | None = None,
    ) -> None:
        options = {"hosts": hosts, "cluster_mode": cluster_mode, "capacity_per_node": capacity_per_node}
        super().__init__(CacheLoader._of_plan(plan("redis", "", "a store", 1, False, options)))
