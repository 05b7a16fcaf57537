"""Addresses of this host that others may reach, beside what psutil knows of them."""

from __future__ import annotations

import ipaddress

import psutil
import pytest

from bagua_agent.node.interface_addresses import has_ipv6_alone, interface_addresses


def test_they_are_what_this_host_has() -> None:
    known = {name: {a.address for a in found} for name, found in psutil.net_if_addrs().items()}
    for name, addresses in interface_addresses().items():
        assert addresses and set(addresses) <= known[name]
        assert not any(ipaddress.ip_address(a).is_loopback for a in addresses)
    for name, state in psutil.net_if_stats().items():
        ipv4 = {a for a in known.get(name, ()) if a.count(".") == 3 and not a.startswith("127.")}
        assert not state.isup or not ipv4 or ipv4 & set(interface_addresses().get(name, ()))


@pytest.mark.parametrize(
    ("addresses", "alone"),
    [
        ({}, False),
        ({"eth0": ["fd12::5"]}, True),
        ({"eth0": ["10.1.0.5", "fd12::5"]}, False),
        ({"eth0": ["fd12::5"], "eth1": ["10.1.0.5"]}, False),
    ],
)
def test_hosts_with_ipv6_alone(addresses: dict[str, list[str]], alone: bool) -> None:
    assert has_ipv6_alone(addresses) is alone
