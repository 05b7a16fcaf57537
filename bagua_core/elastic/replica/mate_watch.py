"""Notices at once that another shard of this worker's replica has ended, whatever this worker computes meanwhile.

Shard 0 holds a TCP connection to each other shard, made when the replica is assembled and used for nothing but its end.
A worker that leaves in order says farewell first. The end of a connection without one is reported, once; a host that
falls silent ends no connection, and is found by the agents' touches. Owns the connections and the thread that waits on
them; knows nothing of generations.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_core.errors import InfrastructureLost

FAREWELL = b"e"
KEEPALIVE_S = 60
HELLO_WITHIN_S = 2.0  # of a caller, who may be a stranger
_KEY = "watch"  # the port and the token of shard 0, in the replica's store
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")  # token, shard rank


class WatchFailed(InfrastructureLost):
    """A shard did not connect in time."""


def connect(
    store: Store, shard_rank: int, size: int, bind_host: str, first_host: str, within_s: float
) -> dict[int, socket.socket]:
    """The connections that this shard has, by the shard at the other end. first_host: of shard 0. Raises WatchFailed,
    OSError, MeetingStoreError."""
    if shard_rank:
        port, told = store.get(_KEY).decode().split()
        link = socket.create_connection((first_host, int(port)), within_s, source_address=(bind_host, 0))
        link.sendall(_HELLO.pack(bytes.fromhex(told), shard_rank))
        return {0: link}
    with socket.create_server((bind_host, 0), backlog=128) as listening:
        token = secrets.token_bytes(_TOKEN_BYTES)
        store.set(_KEY, f"{listening.getsockname()[1]} {token.hex()}")
        return _accepted(listening, token, size, time.monotonic() + within_s)


def _accepted(
    listening: socket.socket, token: bytes, size: int, deadline_s: float
) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    try:
        while len(links) < size - 1:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                missing = [str(shard) for shard in range(1, size) if shard not in links]
                raise WatchFailed(f"shard {', '.join(missing)} did not connect in time")
            listening.settimeout(left_s)
            try:
                link, _ = listening.accept()
            except TimeoutError:
                continue  # the deadline has passed
            shard = _shard_of(link, token, size)
            if shard is None or shard in links:
                link.close()
            else:
                links[shard] = link
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


def _shard_of(link: socket.socket, token: bytes, size: int) -> int | None:
    """None for a caller that is no shard of this replica."""
    link.settimeout(HELLO_WITHIN_S)
    try:
        hello = link.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) != _HELLO.size:
        return None
    told, shard = _HELLO.unpack(hello)
    return shard if hmac.compare_digest(told, token) and 0 < shard < size else None


class MateWatch:
    """links: as `connect` gave them; owned from here on. on_lost(shard rank): from a thread of its own, once."""

    def __init__(self, links: Mapping[int, socket.socket], on_lost: Callable[[int], None]) -> None:
        self._links = dict(links)
        self._on_lost = on_lost
        self._wake, self._woken = socket.socketpair()
        for link in self._links.values():
            link.setblocking(False)
            # so that no firewall forgets a connection that carries nothing
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        _close_in_children(self)
        self._thread = threading.Thread(target=self._watch, name="bagua-mates", daemon=True)
        self._thread.start()

    def close(self, *, in_order: bool) -> None:
        """in_order: this worker leaves, which the other shards need not report."""
        self._wake.close()  # ends the thread
        self._thread.join()
        for link in self._links.values():
            if in_order:
                _say_farewell(link)
            link.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector, self._woken:
            selector.register(self._woken, selectors.EVENT_READ)
            for shard, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, shard)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    selector.unregister(key.fileobj)
                    if not _is_farewell(self._links[key.data]):
                        self._on_lost(key.data)
                        return  # the replica is over


def _is_farewell(link: socket.socket) -> bool:
    """The connection has something to read: a farewell, or its end."""
    try:
        return link.recv(1) == FAREWELL
    except OSError:
        return False


def _say_farewell(link: socket.socket) -> None:
    try:
        link.send(FAREWELL)
    except OSError:
        return  # that shard has gone already


def _close_in_children(watch: MateWatch) -> None:
    """A process that the script forks must not hold the connections open when this one ends."""
    known = weakref.ref(watch)

    def close() -> None:
        if (held := known()) is not None:
            for link in (*held._links.values(), held._wake, held._woken):
                link.close()

    os.register_at_fork(after_in_child=close)
