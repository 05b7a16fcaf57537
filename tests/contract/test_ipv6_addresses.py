"""The IPv6 addresses of this host's interfaces are read once, for the agent and for the core."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from bagua_agent.node import interface_addresses
from bagua_contract import ipv6_addresses
from bagua_core.communication.local_interface import interface_of

LINES = """\
fd000000000000000000000000000007 02 40 00 80     eth0
fd000000000000000000000000000008 02 40 00 c0     eth0
fe800000000000000000000000000001 02 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "if_inet6").write_text(LINES)
    monkeypatch.setattr(ipv6_addresses, "_ADDRESSES", tmp_path / "if_inet6")


@pytest.mark.usefixtures("listed")
def test_each_line_is_an_address_of_an_interface() -> None:
    first, tentative, *_ = found = ipv6_addresses.ipv6_addresses()
    assert first == ipv6_addresses.InterfaceAddress(ipaddress.IPv6Address("fd00::7"), 0, 0x80, "eth0")
    assert tentative.flags == 0xC0 and [one.scope for one in found] == [0, 0, 0x20, 0x10]


@pytest.mark.usefixtures("listed")
def test_the_agent_offers_addresses_of_global_scope_that_are_not_tentative() -> None:
    assert interface_addresses._ipv6_addresses() == {"eth0": ["fd00::7"]}


@pytest.mark.usefixtures("listed")
def test_the_core_finds_the_interface_of_any_address() -> None:
    assert [interface_of(a) for a in ("fd00::7", "fe80::1", "fe80::1%eth0", "::1", "fd00::9")] == [
        "eth0",
        "eth0",
        "eth0",
        "lo",
        None,
    ]


def test_a_kernel_without_ipv6_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipv6_addresses, "_ADDRESSES", tmp_path / "nothing")
    assert ipv6_addresses.ipv6_addresses() == []
    assert interface_of("fd00::7") is None
