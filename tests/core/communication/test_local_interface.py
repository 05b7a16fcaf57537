"""An address of this host has an interface, and another has none."""

from __future__ import annotations

import pytest

from bagua_core.communication.local_interface import interface_of
from tests.lab.ipv6 import IPV6_HERE, needs_ipv6


def test_loopback_has_its_interface_by_address_and_by_name() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"


@pytest.mark.parametrize("host", ["203.0.113.9", "2001:db8::9"])
def test_an_address_of_another_host_has_none(host: str) -> None:
    assert interface_of(host) is None


@needs_ipv6
def test_an_address_of_version_6_is_found_too() -> None:
    assert interface_of(IPV6_HERE) == "lo"
