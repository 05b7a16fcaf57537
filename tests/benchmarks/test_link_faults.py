"""Faults of lab links: packets are lost in the stated share, and congestion control is the stated one."""

from __future__ import annotations

import socket

import pytest

from benchmarks import link_faults
from tests.lab import namespaces
from tests.lab.network import Lab

PACKETS = 2000
ENDS = 40  # of which one arrives


def test_half_of_the_packets_are_lost_and_connections_use_the_named_congestion_control() -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    with Lab(2) as lab:
        sender, receiver = lab.hosts
        link_faults.use_congestion_control(lab, "reno")
        listener = receiver.inside(lambda: socket.create_server((receiver.address, 7)))
        with listener, sender.connect((receiver.address, 7), 10) as connection:
            chosen = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert chosen.rstrip(b"\0") == b"reno"

        link_faults.drop_packets(lab, 0.5)
        into = receiver.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        out = sender.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        with into, out:
            into.setsockopt(socket.SOL_SOCKET, 33, 16 * 1024 * 1024)  # SO_RCVBUFFORCE: no other loss
            into.bind((receiver.address, 9))
            into.settimeout(10)
            for _ in range(PACKETS):
                out.sendto(b"x", (receiver.address, 9))
            for _ in range(ENDS):
                out.sendto(b"end", (receiver.address, 9))
            received = sum(1 for _ in iter(lambda: into.recv(16), b"end"))
        assert PACKETS * 0.4 < received < PACKETS * 0.6
