"""An endpoint is a name to connect to; what is bound is an address that the others' connections arrive at."""

from __future__ import annotations

import socket

import pytest

from bagua_agent.node.listening_address import EVERYWHERE, listening_host, listening_target, own_addresses


@pytest.mark.parametrize(
    ("host", "own", "bound"),
    [
        ("10.0.0.7", ["10.0.0.7"], "10.0.0.7"),
        ("fe80::1%eth0", [], "fe80::1%eth0"),
        ("localhost", ["127.0.0.1"], "localhost"),
        ("node-1", ["10.0.0.7"], "10.0.0.7"),
        ("node-1", ["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        ("node-1", ["127.0.1.1"], EVERYWHERE),  # Debian's /etc/hosts
        ("service", [], EVERYWHERE),  # its address is translated on the way here
    ],
)
def test_where_to_listen(host: str, own: list[str], bound: str) -> None:
    assert listening_host(host, own) == bound


def test_what_is_bound_is_an_address_of_this_host() -> None:
    name = socket.gethostname()
    host, _, port = listening_target(f"{name}:0").rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host.strip("[]"), int(port)))
    assert own_addresses("no-such-host.invalid") == []
