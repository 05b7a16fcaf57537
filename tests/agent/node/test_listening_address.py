"""An endpoint is a name to connect to; what is bound is an address that the others' connections arrive at."""

from __future__ import annotations

import socket

import pytest

from bagua_agent.node.listening_address import (
    EVERYWHERE,
    EVERYWHERE_V6,
    is_this_host,
    listening_host,
    listening_target,
    own_addresses,
)


@pytest.mark.parametrize(
    ("host", "own", "bound"),
    [
        ("10.0.0.7", ["10.0.0.7"], "10.0.0.7"),
        ("fe80::1%eth0", ["fe80::1%eth0"], "fe80::1%eth0"),
        ("203.0.113.7", [], EVERYWHERE),  # translated on the way, as that of a container's host
        ("2001:db8::7", [], "::"),
        ("localhost", ["127.0.0.1"], "localhost"),
        ("node-1", ["10.0.0.7"], "10.0.0.7"),
        ("node-1", ["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        ("node-1", ["127.0.1.1"], EVERYWHERE),  # Debian's /etc/hosts
        ("service", [], EVERYWHERE),  # its address is translated on the way here
    ],
)
def test_where_to_listen(host: str, own: list[str], bound: str) -> None:
    assert listening_host(host, own) == bound


def test_a_host_with_ipv6_alone_listens_at_ipv6() -> None:
    assert listening_host("node-1", ["127.0.1.1"], ipv6_alone=True) == EVERYWHERE_V6
    assert listening_host("service", [], ipv6_alone=True) == EVERYWHERE_V6
    assert listening_host("203.0.113.7", [], ipv6_alone=True) == EVERYWHERE, "it is an address of IPv4"


def test_what_is_bound_is_an_address_of_this_host() -> None:
    name = socket.gethostname()
    host, _, port = listening_target(f"{name}:0").rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host.strip("[]"), int(port)))
    assert own_addresses("no-such-host.invalid") == []


@pytest.mark.parametrize(
    ("host", "own_name", "is_own"),
    [
        ("node-1.invalid", "node-1.invalid", True),
        ("node-1.invalid", "Node-1", True),  # the cluster's DNS does not know it yet
        ("no-such-host", "no-such-host.invalid", True),
        ("node-2.invalid", "node-1", False),
        ("node-1.a.invalid", "node-1.b.invalid", False),
        ("node-1.invalid", "node", False),
        ("127.0.0.1", "node-1", True),
        ("192.0.2.1", "192", False),  # known, and another's
        ("etcd..svc", "node-1", False),  # no name at all
    ],
)
def test_names_of_this_host(host: str, own_name: str, is_own: bool) -> None:
    assert is_this_host(host, own_name) is is_own
