"""Fixtures for tests of NCCL's network interface: drivers of a real libnccl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.net_driver import build, libnccl
from benchmarks.net_driver.process import Driver
from tests.lab.fixtures import make_lab

__all__ = ["make_lab"]

MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="session")
def nccl_library() -> Path:
    """The pinned libnccl; skips only where the package index does not answer or has no wheel for this machine."""
    try:
        return libnccl.path()
    except libnccl.LibraryUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def make_driver(request: pytest.FixtureRequest) -> Iterator[MakeDriver]:
    """Drivers of NCCL's own sockets on the loopback interface, or as the arguments say; killed with the test.

    words: what follows the kind on the driver's command line; None: the pinned libnccl.
    """
    with ExitStack() as drivers:

        def make(
            kind: str = "sockets", host: object = None, words: list[str | Path] | None = None, **env: str
        ) -> Driver:
            words = [kind, *([request.getfixturevalue("nccl_library")] if words is None else words)]
            interface = "lo" if host is None else "eth0"
            env = {"NCCL_SOCKET_IFNAME": interface, "NCCL_IB_DISABLE": "1", **env}
            return drivers.enter_context(Driver(build.driver(), words, env, host))  # type: ignore[arg-type]

        yield make
