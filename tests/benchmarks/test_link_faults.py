"""Faults of lab links: packets are lost in the stated share, and congestion control is the stated one."""

from __future__ import annotations

import socket

import pytest

from benchmarks import bagua_net, link_faults
from benchmarks.bagua_net import Condition
from benchmarks.net_driver.pair import Plan
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


@pytest.mark.usefixtures("nccl_on_lab_hosts")
def test_one_slow_connection_of_four_holds_up_a_transfer_that_is_cut_into_equal_parts() -> None:
    """As NCCL's own sockets cut it: four times the slow connection's speed, of four times 1 Gbit/s."""
    condition, transfer = Condition("1gbit", slow_flow=True), Plan(16 * 1024 * 1024, 4, acknowledge_every=4)
    with Lab(2) as lab, bagua_net.connected(lab, condition, None) as pairs:
        pair = pairs["1x4"]
        limits = link_faults.SlowFlows(lab.hosts[0], condition.rate, bagua_net.SLOW_RATE)
        pair.stream(transfer, 1)
        assert limits.limit(pair.sender) == 4
        assert pair.stream(transfer, 1).gigabytes_per_s < 4 * 0.2 / 8 * 1.3
        with pytest.raises(RuntimeError, match="no TCP connection of process"):
            limits.limit(pairs["0x1"].sender)
