"""Addresses are read as they were written, and loopback is known by address and by name."""

from __future__ import annotations

import pytest

from bagua_contract.addresses import is_loopback, joined, parted


@pytest.mark.parametrize("host", ["10.0.0.3", "fe80::1", "node-3"])
def test_an_address_is_read_as_it_was_written(host: str) -> None:
    assert parted(joined(host, 2379)) == (host, 2379)
    assert joined(host, 2379).startswith("[") is (":" in host)
    with pytest.raises(ValueError):
        parted(host if ":" not in host else f"[{host}]")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.3", False),
        ("h2", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
