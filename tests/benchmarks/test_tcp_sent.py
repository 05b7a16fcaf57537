"""Bytes are counted over every open TCP connection of the process, and over no other socket."""

from __future__ import annotations

import socket

from benchmarks.tcp_sent import tcp_sent_bytes


def test_what_goes_over_tcp_is_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        local, peer = socket.socketpair()
        with local, peer:
            before = tcp_sent_bytes()
            one.sendall(b"x" * 3000)
            other.sendall(b"y" * 500)
            local.sendall(b"z" * 70)
            assert len(other.recv(3000, socket.MSG_WAITALL)) == 3000
            assert len(one.recv(500, socket.MSG_WAITALL)) == 500
            assert tcp_sent_bytes() - before == 3500
