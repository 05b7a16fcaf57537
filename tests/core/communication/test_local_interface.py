"""An address of this host has an interface, and another has none."""

from __future__ import annotations

import socket

import pytest

from bagua_core.communication.local_interface import interface_of


def test_loopback_has_its_interface_by_address_and_by_name() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"


@pytest.mark.parametrize("host", ["203.0.113.9", "2001:db8::9"])
def test_an_address_of_another_host_has_none(host: str) -> None:
    assert interface_of(host) is None


def test_an_address_of_version_6_is_found_too() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as listening:
            listening.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6")
    assert interface_of("::1") == "lo"
