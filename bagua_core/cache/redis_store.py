"""Keeps frames in Redis, sharded over servers that may be lost and come back.

A server that does not answer within TIMEOUT_S counts as lost: its keys are missing and what should be written to it is
dropped, until a try after a pause succeeds. No call raises for it. Needs the package `redis`, imported on first use.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bagua_contract.distribution import REDIS_HINT
from bagua_core.cache.errors import CacheOptionError, MissingPartError, StoreFault
from bagua_core.cache.fault_notices import FaultNotices
from bagua_core.cache.redis_servers import ServerHealth, Sharding
from bagua_core.cache.stores import Item, Usage, Written, removal

if TYPE_CHECKING:
    from bagua_core.cache.frames import Buffer

T = TypeVar("T")

TIMEOUT_S = 1.0  # for an answer, and for a connection
_LARGEST_BYTES = 512 << 20  # Redis takes no larger values
_READ_TOGETHER = 64  # keys in a request: frames may be large, and the timeout is for all of them


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a Redis server: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    socket_path: str = ""
    password: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.socket_path or f"{self.host}:{self.port}"


def servers_of(hosts: Sequence[Any]) -> tuple[Server, ...]:
    """Returns the servers of the option `hosts`. Raises CacheOptionError.

    hosts: dictionaries with `host` and `port` (and `password`), or strings `host:port`.
    """
    servers = []
    for given in hosts:
        described = given
        if isinstance(given, str):
            host, _, port = given.rpartition(":")
            described = {"host": host, "port": port}
        try:
            server = Server(str(described["host"]), int(described["port"]), "", described.get("password"))
        except (KeyError, TypeError, ValueError, AttributeError):
            server = Server()
        if not server.host or not 0 < server.port < 65536:
            raise CacheOptionError(
                f"hosts={hosts!r}: {given!r} is not {{'host': ..., 'port': ...}} or 'host:port'"
            )
        servers.append(server)
    if not servers or len({server.name for server in servers}) != len(servers):
        raise CacheOptionError(f"hosts={hosts!r}: give at least one server, and each once")
    return tuple(servers)


def client_package() -> Any:
    """Returns the module redis. Raises MissingPartError if it is not installed."""
    try:
        import redis
    except ImportError as error:
        raise MissingPartError(f"backend='redis' needs the package redis: {REDIS_HINT}") from error
    return redis


class _Connection:
    """The connection to one server, with the server's health."""

    def __init__(self, package: Any, server: Server, timeout_s: float, notices: FaultNotices) -> None:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.server = server
        self.health = ServerHealth()
        self._notices = notices
        errors = package.exceptions
        # InvalidResponse: the server that answers is not Redis
        self._failures = (errors.ConnectionError, errors.TimeoutError, errors.InvalidResponse, OSError)
        place: dict[str, Any] = (
            {"unix_socket_path": server.socket_path}
            if server.socket_path
            else {"host": server.host, "port": server.port, "socket_keepalive": True}
        )
        self.client = package.Redis(
            **place,
            password=server.password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # the pause is ours, and other servers must not wait for it
            protocol=2,
        )

    def ask(self, work: Callable[[Any], T]) -> T | None:
        """Returns the result of `work` on the client; None if the server is lost, or is not tried again yet."""
        if not self.health.may_ask(time.monotonic()):
            return None
        name = self.server.name
        try:
            done = work(self.client)
        except self._failures as error:
            self.health.failed(time.monotonic())
            self._notices.say(
                f"lost {name}",
                f"no answer from Redis at {name} ({error}); its keys are loaded anew until it is back",
            )
            return None
        if self.health.answered():
            self._notices.over(f"lost {name}", f"Redis at {name} is back")
        return done


class RedisServers:
    """A Store (stores.py) on Redis servers.

    prefix: of all keys. sharded: False uses one server for all of this node's keys.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        prefix: bytes,
        notices: FaultNotices,
        *,
        sharded: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        package = client_package()
        self._refusals = package.exceptions.ResponseError
        self._prefix = prefix
        self._sharding = Sharding([server.name for server in servers])
        self._only = None if sharded else self._sharding.own_server(socket.gethostname())
        self._connections = [_Connection(package, server, timeout_s, notices) for server in servers]
        self._notices = notices

    def _owner(self, key: bytes) -> int:
        return self._sharding.owner(key) if self._only is None else self._only

    def read(self, keys: Sequence[bytes]) -> Sequence[Buffer | None]:
        frames: list[Buffer | None] = [None] * len(keys)
        by_owner: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            by_owner.setdefault(self._owner(key), []).append(index)
        for owner, indices in by_owner.items():
            for begin in range(0, len(indices), _READ_TOGETHER):
                some = indices[begin : begin + _READ_TOGETHER]
                found = self._fetch(owner, [self._prefix + keys[i] for i in some])
                for index, frame in zip(some, found, strict=True):
                    frames[index] = frame
        return frames

    def _fetch(self, owner: int, names: list[bytes]) -> Sequence[bytes | None]:
        found: list[bytes | None] | None = self._ask(owner, lambda client: client.mget(names))
        return [None] * len(names) if found is None else found

    def _ask(self, owner: int, work: Callable[[Any], T]) -> T | None:
        """Returns the result of `work`; None if the server is lost or refuses it, as its rights of commands may say."""
        try:
            return self._connections[owner].ask(work)
        except self._refusals as error:
            self._say_refusal(owner, error)
            return None

    def write(self, items: Sequence[Item]) -> Written:
        written = Written()
        by_owner: dict[int, list[Item]] = {}
        for item in items:
            is_refused = len(item.frame) > _LARGEST_BYTES
            written.refused += is_refused
            if not is_refused or item.replaces:
                kept = removal(item.key) if is_refused else item
                by_owner.setdefault(self._owner(item.key), []).append(kept)
        for owner, some in by_owner.items():
            answers = self._ask(owner, functools.partial(self._send, some))
            if answers is None:
                written.lost += len(some)
                continue
            replaced: list[Item] = []
            for item, answer in zip(some, answers, strict=True):
                if isinstance(answer, Exception):
                    written.refused += 1
                    self._say_refusal(owner, answer)
                    if item.replaces and item.frame:
                        replaced.append(removal(item.key))
                else:
                    written.stored += bool(answer and item.frame)
            if replaced:
                written.lost += self._not_removed(owner, replaced)
        return written

    def _not_removed(self, owner: int, removals: Sequence[Item]) -> int:
        """Sends removals. Returns how many of them failed."""
        answers = self._ask(owner, functools.partial(self._send, removals))
        if answers is None:
            return len(removals)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for error in errors:
            self._say_refusal(owner, error)
        return len(errors)

    def _send(self, items: Sequence[Item], client: Any) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for item in items:
            name = self._prefix + item.key
            if item.frame:
                pipeline.set(name, memoryview(item.frame), nx=not item.replaces)
            else:
                pipeline.unlink(name)
        return list(pipeline.execute(raise_on_error=False))

    def _say_refusal(self, owner: int, error: Exception) -> None:
        name = self._connections[owner].server.name
        if "maxmemory" in str(error):
            self._notices.say(
                f"full {name}",
                f"Redis at {name} is full; what is in it stays and is used, further values are loaded anew each time",
            )
        else:
            self._notices.say(f"refused {name}", f"Redis at {name} refuses: {error}")

    def usage(self) -> Usage:
        used = 0
        most = 0
        for owner in range(len(self._connections)):
            told = self._ask(owner, lambda client: client.info("memory"))
            if told is None:
                return Usage(-1, -1, -1, self._where())
            used += int(told["used_memory"])
            most += int(told.get("maxmemory", 0))
        return Usage(-1, used, most or -1, self._where())

    def _where(self) -> str:
        return ", ".join(connection.server.name for connection in self._connections)

    def is_whole(self) -> bool:
        return all(
            [self._ask(owner, lambda client: client.ping()) for owner in range(len(self._connections))]
        )

    def count(self) -> int:
        return sum(
            self._on_each(lambda client: sum(1 for _ in client.scan_iter(self._pattern(), count=1000)))
        )

    def clear(self) -> None:
        def forget(client: Any) -> int:
            for name in client.scan_iter(self._pattern(), count=1000):
                client.unlink(name)
            return 0

        self._on_each(forget)

    def _on_each(self, work: Callable[[Any], int]) -> list[int]:
        results = []
        for connection in self._connections:
            name = connection.server.name
            try:
                done = connection.ask(work)
            except self._refusals as error:
                raise StoreFault("refused", f"Redis at {name} refuses: {error}") from error
            if done is None:
                raise StoreFault("lost", f"Redis at {name} does not answer")
            results.append(done)
        return results

    def _pattern(self) -> bytes:
        return (
            b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^-" else bytes([byte]) for byte in self._prefix)
            + b"*"
        )

    def end_read(self) -> None:
        """Does nothing, for the frames are copies."""

    def close(self) -> None:
        for connection in self._connections:
            connection.client.close()
