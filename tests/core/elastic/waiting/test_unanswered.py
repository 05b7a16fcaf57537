"""Peers that do not acknowledge: the kernel's table as a text, and real connections between the lab's hosts."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from contextlib import ExitStack

import pytest

from bagua_core.elastic.waiting.unanswered import Connection, connections, own_sockets, silent_hosts
from tests.lab.fixtures import MakeLab, lab, make_lab
from tests.lab.wait import eventually

__all__ = ["MakeLab", "lab", "make_lab"]

DEADLINE_S = 8.0

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100000A:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 x 100 0 0 10 0
   1: 0100000A:9C40 0200000A:1F90 01 00000400:00000000 01:0000001F 00000003     0        0 12 2 x 100 0 0 10 0
   2: 0100000A:9C41 0300000A:1F90 01 00000400:00000000 01:0000001F 00000002     0        0 13 2 x 100 0 0 10 0
   3: 0100000A:9C42 0400000A:1F90 02 00000001:00000000 01:0000001F 00000001     0        0 14 2 x 100 0 0 10 0
   4: 0100000A:9C43 0500000A:1F90 06 00000000:00000000 03:00000EFC 00000009     0        0 0 3 x
"""
TABLE6 = """\
  sl  local_address remote_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode
   0: 0:0 0000000000000000FFFF00000200000A:1F90 01 00000400:00000000 01:0000001F 00000004 0 0 15
   1: B80D01200000000000000000 01:9C40
   2: 0:0 B80D0120000000000000000002000000:1F90 02 00000400:00000000 01:0000001F 00000000 0 0 16
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the texts are of a little-endian machine")
def test_what_the_tables_say() -> None:
    assert list(connections(TABLE)) == [
        Connection(12, "10.0.0.2", False, 3),
        Connection(13, "10.0.0.3", False, 2),
        Connection(14, "10.0.0.4", True, 1),
    ]
    assert [c.is_unanswered for c in connections(TABLE)] == [True, False, True]
    assert list(connections(TABLE6)) == [
        Connection(15, "10.0.0.2", False, 4),
        Connection(16, "2001:db8::2", True, 0),
    ]


def test_own_sockets_come_and_go() -> None:
    before = own_sockets()
    one, other = socket.socketpair()
    with one, other:
        inodes = {os.fstat(s.fileno()).st_ino for s in (one, other)}
        assert inodes <= own_sockets() - before
    assert not inodes & own_sockets()  # those that other tests left may be closed at any time


@pytest.mark.parametrize("lost", ["what it sends", "what comes back", "nothing"])
def test_a_cut_names_the_peer_and_one_that_does_not_read_is_none(make_lab: MakeLab, lost: str) -> None:
    here, there = make_lab(2).hosts
    address = there.address
    with there.listen() as listener, ExitStack() as sockets:
        place = (address, listener.getsockname()[1])
        old = sockets.enter_context(here.connect(place, DEADLINE_S))
        before = own_sockets()
        new = sockets.enter_context(here.connect(place, DEADLINE_S))
        if lost == "what it sends":
            here.cut_to(there, one_way=True)
        elif lost == "what comes back":
            there.cut_to(here, one_way=True)
        old.send(b"x")
        new.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until the peer's buffer is full: it does not read
                new.send(bytes(1 << 16))

        def silent(older: frozenset[int]) -> tuple[str, ...]:
            return here.inside(lambda: silent_hosts([address, "10.9.9.9"], older))

        if lost == "nothing":
            deadline_s = time.monotonic() + 2.5
            with pytest.raises(AssertionError):
                eventually(lambda: silent(before), deadline_s - time.monotonic(), "named", 0.1)
            return
        began_s = time.monotonic()
        assert eventually(lambda: silent(before), DEADLINE_S, "the peer is named", 0.05) == (address,)
        assert time.monotonic() - began_s < 3.0
        assert silent(own_sockets()) == (), "connections of before say nothing"
        connecting = sockets.enter_context(here.inside(socket.socket))
        connecting.setblocking(False)
        older = own_sockets() - {os.fstat(connecting.fileno()).st_ino}
        assert here.inside(lambda: connecting.connect_ex(place)) == errno.EINPROGRESS
        assert eventually(lambda: silent(older), DEADLINE_S, "it is not reached", 0.05) == (address,)
