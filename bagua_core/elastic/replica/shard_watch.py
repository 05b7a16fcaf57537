"""Notices at once that another shard of this worker's replica has ended, whatever this worker computes meanwhile.

Shard 0 holds a TCP connection to each other shard, made when the replica is assembled. It carries the words of
joint_following.py, and its end says that the shard has ended. A worker that leaves in order says farewell first. The
end of a connection without one is reported, once; a host that falls silent ends no connection, and is found by the
agents' touches. Owns the connections and the thread that waits on them; knows nothing of generations.
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

from bagua_contract.addresses import family_of
from bagua_core.elastic.replica.joint_following import Word
from bagua_core.errors import InfrastructureLost

_FAREWELL = 0  # in place of a word
_WORDS = frozenset(Word)
KEEPALIVE_S = 60
_KEY = "watch"  # the port and the token of shard 0, in the replica's store
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")  # token, shard rank
_SAID = struct.Struct("!BQ")  # a word, its number
_READ_BYTES = 64 * _SAID.size


class WatchFailed(InfrastructureLost):
    """A shard did not connect in time."""


def connect(
    store: Store, shard_rank: int, size: int, bind_host: str, first_host: str, within_s: float
) -> dict[int, socket.socket]:
    """Makes the connections that this shard has, and returns them by the shard at the other end. first_host: of shard
    0. Raises WatchFailed, OSError, MeetingStoreError."""
    if shard_rank:
        port, told = store.get(_KEY).decode().split()
        link = socket.create_connection((first_host, int(port)), within_s, source_address=(bind_host, 0))
        link.sendall(_HELLO.pack(bytes.fromhex(told), shard_rank))
        return {0: link}
    with socket.create_server((bind_host, 0), family=family_of(bind_host), backlog=128) as listening:
        token = secrets.token_bytes(_TOKEN_BYTES)
        store.set(_KEY, f"{listening.getsockname()[1]} {token.hex()}")
        return _accepted(listening, token, size, time.monotonic() + within_s)


def _accepted(
    listening: socket.socket, token: bytes, size: int, deadline_s: float
) -> dict[int, socket.socket]:
    """Accepts the other shards. All callers are heard at once: one that says nothing, which may be a stranger, keeps no
    shard waiting."""
    links: dict[int, socket.socket] = {}
    heard: dict[socket.socket, bytes] = {}  # of callers that have not said the whole of their hello
    listening.setblocking(False)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            while len(links) < size - 1:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    missing = [str(shard) for shard in range(1, size) if shard not in links]
                    raise WatchFailed(f"shard {', '.join(missing)} did not connect in time")
                for key, _ in selector.select(left_s):
                    if key.data is None:
                        if (link := _caller(listening)) is not None:
                            heard[link] = b""
                            selector.register(link, selectors.EVENT_READ, link)
                        continue
                    link = key.data
                    heard[link] += (said := _said(link, _HELLO.size - len(heard[link])))
                    if said and len(heard[link]) < _HELLO.size:
                        continue
                    selector.unregister(link)
                    shard = _shard_of(heard.pop(link), token, size)
                    if shard is None or shard in links:
                        link.close()
                    else:
                        links[shard] = link
    except BaseException:
        for link in links.values():
            link.close()
        raise
    finally:
        for link in heard:
            link.close()
    return links


def _caller(listening: socket.socket) -> socket.socket | None:
    """Accepts a connection; None where it has gone meanwhile."""
    try:
        link, _ = listening.accept()
    except (BlockingIOError, ConnectionError):
        return None
    link.setblocking(False)
    return link


def _said(link: socket.socket, most_bytes: int) -> bytes:
    """Reads from a connection that is readable; nothing where it has ended."""
    try:
        return link.recv(most_bytes)
    except OSError:
        return b""


def _shard_of(hello: bytes, token: bytes, size: int) -> int | None:
    """Returns the shard rank of the caller; None for a caller that is no shard of this replica."""
    if len(hello) != _HELLO.size:
        return None
    told, shard = _HELLO.unpack(hello)
    return shard if hmac.compare_digest(told, token) and 0 < shard < size else None


class ShardWatch:
    """Watches the connections to other shards of the replica. links: as `connect` gave them; owned from here on. Called
    from a thread of its own: on_lost(shard rank), once; on_word(shard rank, word, number); on_farewell()."""

    def __init__(
        self,
        links: Mapping[int, socket.socket],
        on_lost: Callable[[int], None],
        on_word: Callable[[int, Word, int], None] = lambda shard, word, number: None,
        on_farewell: Callable[[], None] = lambda: None,
    ) -> None:
        self._links = dict(links)
        self._on_lost, self._on_word, self._on_farewell = on_lost, on_word, on_farewell
        self._unread = dict.fromkeys(self._links, b"")
        self._wake, self._woken = socket.socketpair()
        for link in self._links.values():
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # so that no firewall forgets a connection that carries nothing
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        _close_in_children(self)
        self._thread = threading.Thread(target=self._watch, name="bagua-mates", daemon=True)
        self._thread.start()

    def say(self, shard_rank: int, word: Word, number: int) -> None:
        """Sends a word to another shard, from any thread. A shard that is gone does not get it; its loss is
        reported."""
        _say(self._links[shard_rank], word, number)

    def close(self, *, in_order: bool) -> None:
        """Ends the watch and closes the connections. in_order: this worker leaves, which the other shards need not
        report."""
        self._wake.close()  # ends the thread
        self._thread.join()
        for link in self._links.values():
            if in_order:
                _say(link, _FAREWELL, 0)
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
                    if self._goes_on(key.data):
                        continue
                    selector.unregister(key.fileobj)
                    if not self._unread[key.data].endswith(_SAID.pack(_FAREWELL, 0)):
                        self._on_lost(key.data)
                        return  # the replica is over
                    self._on_farewell()

    def _goes_on(self, shard: int) -> bool:
        """Reads what that shard has said. Returns False if nothing more will come; `_unread` has how it ended."""
        try:
            read = self._links[shard].recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        unread = self._unread[shard] + read
        whole = len(unread) - len(unread) % _SAID.size
        for at in range(0, whole, _SAID.size):
            word, number = _SAID.unpack_from(unread, at)
            if word not in _WORDS:
                self._unread[shard] = unread[at : at + _SAID.size]
                return False
            self._on_word(shard, Word(word), number)
        self._unread[shard] = unread[whole:]
        return bool(read)


def _say(link: socket.socket, word: int, number: int) -> None:
    try:
        link.send(_SAID.pack(word, number))  # whole: the buffer of a connection holds thousands
    except OSError:
        return  # that shard has gone already


def _close_in_children(watch: ShardWatch) -> None:
    """Closes the connections in a process that the script forks: it must not hold them open when this one ends."""
    known = weakref.ref(watch)

    def close() -> None:
        if (held := known()) is not None:
            for link in (*held._links.values(), held._wake, held._woken):
                link.close()

    os.register_at_fork(after_in_child=close)
