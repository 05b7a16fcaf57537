"""Jobs and labs for the live tests, as tests/faults has them, and an etcd on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import job
from tests.lab.free_port import free_port

__all__ = ["etcd_endpoint", "job"]


@pytest.fixture
def etcd_endpoint() -> Iterator[str]:
    """host:port of an etcd that ends with the test."""
    server = EmbeddedEtcd.start(f"127.0.0.1:{free_port()}")
    yield server.endpoint.removeprefix("http://")
    server.stop()
