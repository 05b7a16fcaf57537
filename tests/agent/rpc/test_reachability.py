"""What a connection to an agent's port says about its host."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest

from bagua_agent.rpc import reachability as touching
from bagua_agent.rpc.reachability import Reachability, reach_all

WINDOW_S = 0.2


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as made:
        yield made


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a port whose queue is full: the kernel drops what comes, as a host that is off."""
    with ExitStack() as stack:
        full = stack.enter_context(closing(socket.socket()))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filling = stack.enter_context(closing(socket.socket()))
            filling.setblocking(False)
            filling.connect_ex(full.getsockname())
        yield address(full)


def refusing() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        return address(made)


def test_all_are_touched_at_once(listener: socket.socket, silent: str) -> None:
    began_s = time.monotonic()
    addresses = {f"silent-{n}": silent for n in range(8)}
    addresses |= {"there": address(listener), "gone": refusing(), "odd": "host.example:1", "none": ""}
    found = reach_all(addresses, WINDOW_S)
    assert found == dict.fromkeys((f"silent-{n}" for n in range(8)), Reachability.SILENT) | {
        "there": Reachability.ANSWERED,
        "gone": Reachability.REFUSED,
    }
    assert time.monotonic() - began_s < 8 * WINDOW_S, "not one after the other"


@pytest.mark.parametrize(
    "odd", ["[fe80::1%nowhere]:1", "255.255.255.255:1", "224.0.0.1:1", "0.0.0.0:65536", "[::]:x"]
)
def test_an_address_to_which_none_can_connect_keeps_no_other_from_being_touched(
    listener: socket.socket, odd: str
) -> None:
    found = reach_all({"odd": odd, "there": address(listener)}, WINDOW_S)
    assert found.pop("odd", Reachability.SILENT) is Reachability.SILENT
    assert found == {"there": Reachability.ANSWERED}


def test_a_frozen_process_still_answers(listener: socket.socket) -> None:
    """The process never calls accept: its kernel completes the connection."""
    assert reach_all({"a": address(listener)}, WINDOW_S) == {"a": Reachability.ANSWERED}


def test_nothing_stays_open(listener: socket.socket, silent: str) -> None:
    connection_count = 3
    reach_all({f"a{n}": address(listener) for n in range(connection_count)} | {"s": silent}, WINDOW_S)
    for _ in range(connection_count):
        accepted, _peer = listener.accept()
        with closing(accepted):
            accepted.settimeout(5)
            assert accepted.recv(1) == b"", "its end came"


def test_without_a_descriptor_nothing_is_said(listener: socket.socket) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = address(listener)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        found = reach_all({"a": target}, WINDOW_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == {}


def test_silence_that_was_observed_too_late_counts_for_nothing(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process was frozen during the touch."""
    clock = iter([100.0, 100.0, 100.0 + 3 * WINDOW_S, 100.0 + 3 * WINDOW_S])
    monkeypatch.setattr(touching, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert reach_all({"a": silent}, WINDOW_S) == {}
