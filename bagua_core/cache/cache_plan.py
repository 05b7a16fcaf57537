"""Describes and checks the cache that a script requests, before it is opened.

A plan is passed to child processes, however they are started; each opens its own cache from it (`open_cache`).
The arguments are checked here, so a mistake is one error when the cache is created, not during training.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_core.cache import hosted_redis, placement
from bagua_core.cache.errors import CacheOptionError
from bagua_core.cache.node_directory import base_of
from bagua_core.cache.redis_store import Server, client_package, servers_of
from bagua_core.cache.sharing_scope import directory_name, scope_of, scope_on_servers
from bagua_core.elastic.state.heal_memory import available_bytes

BACKENDS = ("embedded", "redis")
DEFAULT_BUFFER_SIZE = 20  # frames; a batch of samples, so that a loader's process ends within milliseconds
_OF_BACKEND = {
    "embedded": ("capacity_bytes", "directory"),
    "redis": ("hosts", "cluster_mode", "capacity_per_node", "directory"),
}
_NODE_FILES_BYTES = 1 << 20  # counters and notices, where frames lie elsewhere


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Describes a cache, checked and complete, for every process that opens it.

    base: the directory of this user's caches on this node, None if there is no room for any. remark: what should be
    reported of the choice. servers: () for a Redis of this node's own.
    """

    backend: str
    title: str
    base: Path | None
    name: str
    prefix: bytes
    buffer_size: int
    allow_pickle: bool
    capacity_bytes: int
    servers: tuple[Server, ...] = ()
    sharded: bool = True
    program: str = ""
    remark: str = ""


def plan(
    backend: str,
    dataset_name: str,
    fingerprint: str,
    buffer_size: int,
    allow_pickle: bool,
    options: dict[str, Any],
) -> CachePlan:
    """Checks the arguments of a cache and returns its plan. options: the backend's own.

    Raises CacheOptionError, naming the value, and MissingPartError.
    """
    if backend not in BACKENDS:
        raise CacheOptionError(f"backend={backend!r}: there are {' and '.join(map(repr, BACKENDS))}")
    for name in options:
        if name not in _OF_BACKEND[backend]:
            raise CacheOptionError(
                f"backend={backend!r} has no option {name}={options[name]!r}; it has {', '.join(_OF_BACKEND[backend])}"
            )
    if not isinstance(dataset_name, str):
        raise CacheOptionError(f"dataset_name={dataset_name!r} is not a string")
    _require_positive("writer_buffer_size", buffer_size)
    scope = scope_of(os.environ, os.getppid())
    name = directory_name(backend, dataset_name, fingerprint, scope.name)
    common = (backend, f"cache {dataset_name!r}" if dataset_name else "cache")
    if backend == "embedded":
        chosen = _placed(options.get("directory"), options.get("capacity_bytes"))
        remark = (
            chosen.reason
            if chosen.path is None or chosen.capacity_bytes != options.get("capacity_bytes")
            else ""
        )
        if options.get("capacity_bytes") is None and chosen.path == placement.SHARED_MEMORY:
            remark = ""
        return CachePlan(
            *common,
            None if chosen.path is None else base_of(chosen.path),
            name,
            b"",
            buffer_size,
            allow_pickle,
            chosen.capacity_bytes,
            remark=remark,
        )
    client_package()
    on_servers = scope_on_servers(os.environ, os.getppid(), dataset_name)
    hosts = options.get("hosts")
    capacity = options.get("capacity_per_node")
    if capacity is not None:
        _require_positive("capacity_per_node", capacity)
    room = _placed(options.get("directory"), _NODE_FILES_BYTES).path
    return CachePlan(
        *common,
        None if room is None else base_of(room),
        name,
        f"bagua:{directory_name(backend, dataset_name, fingerprint, on_servers)}:".encode(),
        buffer_size,
        allow_pickle,
        placement.redis_bytes(available_bytes(), capacity),
        servers=() if hosts is None else servers_of(hosts),
        sharded=bool(options.get("cluster_mode", True)),
        program=hosted_redis.program() if hosts is None else "",
    )


def _placed(directory: Any, capacity_bytes: Any) -> placement.Placement:
    if capacity_bytes is not None:
        _require_positive("capacity_bytes", capacity_bytes, placement.LEAST_BYTES)
    if directory is not None:
        path = Path(directory)
        if not path.is_absolute():
            raise CacheOptionError(f"directory={directory!r} is not an absolute path")
        return placement.place([_room(path)], None, capacity_bytes)
    rooms = [_room(placement.SHARED_MEMORY), _room(Path(tempfile.gettempdir()))]
    return placement.place(rooms, available_bytes(), capacity_bytes)


def _room(path: Path) -> placement.CacheDirectory:
    try:
        status = os.statvfs(path)
    except OSError:
        return placement.CacheDirectory(path, None)
    if not os.access(path, os.W_OK | os.X_OK):
        return placement.CacheDirectory(path, None)
    return placement.CacheDirectory(path, status.f_bavail * status.f_frsize)


def _require_positive(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CacheOptionError(f"{name}={value!r} is not an integer of at least {least}")
