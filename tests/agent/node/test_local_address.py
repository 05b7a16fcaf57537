"""The address that other nodes reach this one at: asked of the kernel's routes, without sending anything."""

from __future__ import annotations

import errno
import socket

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.node import local_address as module
from bagua_agent.node.local_address import LOOPBACK, local_address
from tests.lab.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    ("given", "store_target", "single_node", "address"),
    [
        ("127.0.0.5", None, True, "127.0.0.5"),
        ("127.0.0.5", "127.0.0.1:2379", False, "127.0.0.5"),
        (None, None, True, LOOPBACK),
        (None, "unix:/run/etcd/client:1", True, LOOPBACK),
        (None, "127.0.0.1:2379", False, "127.0.0.1"),
        (None, "127.0.0.1:2379", True, "127.0.0.1"),
    ],
)
def test_which_address(given: str | None, store_target: str | None, single_node: bool, address: str) -> None:
    assert local_address(given, store_target, single_node) == address


def test_the_own_name_of_a_host_that_hosts_the_store_is_no_loopback_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where /etc/hosts gives this host's name a loopback address, that is not where the others reach it."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: found)
    assert local_address(None, "node-1:2379", False) == local_address(None, None, False)
    assert local_address(None, "node-1:2379", True).startswith("127.")


V4, V6 = ("192.0.2.1", 9), ("2001:db8::1", 9)  # destinations that a default route leads to


@pytest.mark.parametrize(
    ("routes", "interfaces", "address"),
    [
        ({V4: "10.0.0.7", V6: "fd12::7"}, {"eth1": ["10.1.0.5"]}, "10.0.0.7"),
        ({V6: "fd12::7"}, {"eth0": ["fd12::7"], "eth1": ["10.1.0.5"]}, "fd12::7"),
        ({V6: "fd12::5"}, {"eth1": ["10.1.0.5", "fd12::5"]}, "10.1.0.5"),
        ({}, {"eth1": ["10.1.0.5", "fd12::5"]}, "10.1.0.5"),
        ({}, {"eth1": ["fd12::5"]}, "fd12::5"),
        ({}, {}, LOOPBACK),  # no other host reaches this one
    ],
)
def test_without_a_route_to_the_store_it_is_one_that_leaves_the_host(
    monkeypatch: pytest.MonkeyPatch,
    routes: dict[tuple[str, int], str],
    interfaces: dict[str, list[str]],
    address: str,
) -> None:
    monkeypatch.setattr(module, "_source_towards", routes.get)
    monkeypatch.setattr(module, "interface_addresses", lambda: interfaces)
    assert local_address(None, None, False) == address
    assert local_address(None, None, True) == LOOPBACK


def test_where_only_the_person_knows_which_address_others_reach_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_source_towards", lambda to: None)
    found = {"eth1": ["10.1.0.5", "fd12::5"], "docker0": ["172.17.0.1"]}
    monkeypatch.setattr(module, "interface_addresses", lambda: found)
    each = r"10\.1\.0\.5 at eth1, 172\.17\.0\.1 at docker0"
    with pytest.raises(UserError, match=rf"this host has no default route, and several addresses \({each}\)"):
        local_address(None, None, False)
    assert local_address("127.0.0.5", None, False) == "127.0.0.5"
    assert local_address(None, None, True) == LOOPBACK


def test_a_host_without_sockets_of_ipv4_has_no_route_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refuse)
    assert module._source_towards(V4) is None


def test_a_name_is_resolved() -> None:
    assert local_address("localhost", None, False) in ("127.0.0.1", "::1")
    assert local_address(None, "localhost:2379", False) in ("127.0.0.1", "::1")


@needs_ipv6
def test_a_store_with_a_v6_address() -> None:
    assert local_address(None, "[::1]:2379", False) == "::1"


def test_without_a_store_to_go_to_it_is_an_address_of_this_machine() -> None:
    address = local_address(None, None, False)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as own:
        own.bind((address, 0))  # fails unless it is


@pytest.mark.parametrize(
    ("given", "store_target", "words"),
    [
        ("no-such-host.invalid", None, "--local-addr 'no-such-host.invalid' can't be resolved"),
        (None, "no-such-host.invalid:2379", "--rdzv-endpoint 'no-such-host.invalid' can't be resolved"),
        (
            None,
            "etcd..svc:2379",
            r"--rdzv-endpoint 'etcd\.\.svc' is no host name \(label empty or too long\)",
        ),
        (f"{'a' * 64}.svc", None, r"is no host name \(label empty or too long\)"),
    ],
)
def test_what_is_no_address_is_named(given: str | None, store_target: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        local_address(given, store_target, False)
