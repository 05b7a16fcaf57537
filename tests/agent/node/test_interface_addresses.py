"""Addresses of this host that others may reach, beside what psutil knows of them."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import psutil
import pytest

from bagua_agent.node import interface_addresses as module
from bagua_agent.node.interface_addresses import has_ipv6_alone, interface_addresses


def test_they_are_what_this_host_has() -> None:
    known = {name: {a.address for a in found} for name, found in psutil.net_if_addrs().items()}
    for name, addresses in interface_addresses().items():
        assert addresses and set(addresses) <= known[name]
        assert not any(ipaddress.ip_address(a).is_loopback for a in addresses)
    for name, state in psutil.net_if_stats().items():
        if Path("/sys/class/net", name, "bridge").exists():
            continue
        ipv4 = {a for a in known.get(name, ()) if a.count(".") == 3 and not a.startswith("127.")}
        assert not state.isup or not ipv4 or ipv4 & set(interface_addresses().get(name, ()))


@pytest.mark.parametrize(
    ("files", "is_within_host"),
    [
        (["eth0/device"], False),
        (["br/brif/veth1", "br/bridge", "veth1/brport"], True),
        (["br/bridge"], True),
        (["br/brif/veth1", "br/brif/eth0", "br/bridge", "veth1/brport", "eth0/device"], False),
        (["br/brif/bond0", "br/bridge", "bond0/lower_eth0", "eth0/device"], False),
    ],
)
def test_a_bridge_between_containers_has_no_address_for_other_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], is_within_host: bool
) -> None:
    """The files are as the kernel lays them out below /sys/class/net."""
    monkeypatch.setattr(module, "_INTERFACES", tmp_path)
    for file in files:
        (tmp_path / file).mkdir(parents=True)
    monkeypatch.setattr(module.socket, "if_nameindex", lambda: [(1, files[0].partition("/")[0])])
    monkeypatch.setattr(module, "_ipv6_addresses", dict)
    asked = {module._GET_FLAGS: b"\x40\0", module._GET_ADDRESS: bytes(4) + bytes((10, 1, 0, 5))}
    monkeypatch.setattr(module, "_asked", lambda kernel, request, interface: asked[request])
    assert bool(interface_addresses()) is not is_within_host


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
