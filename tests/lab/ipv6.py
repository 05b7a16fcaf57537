"""The IPv6 loopback address, and the mark of tests that need it."""

from __future__ import annotations

import socket

import pytest

IPV6_HERE = "::1"


def _can_listen() -> bool:
    try:
        with socket.create_server((IPV6_HERE, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(
    not _can_listen(), reason=f"this host has no IPv6 loopback address {IPV6_HERE}"
)
