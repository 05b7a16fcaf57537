"""Ports for servers of tests: no connection of another lane takes one meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.lab.free_port import free_port


def test_ports_differ_and_lie_below_those_that_the_kernel_gives_away() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < first


def test_a_port_in_use_is_passed_over() -> None:
    before = free_port()
    with socket.create_server(("127.0.0.1", before + 1)):
        assert free_port() == before + 2
