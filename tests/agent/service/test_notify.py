"""The daemon's messages to systemd, over a real datagram socket, as NOTIFY_SOCKET names one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.service.notify import FEEDS_IN_A_WINDOW, Notifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(0.2)
        yield receiver


def heard(systemd: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(systemd.recv(4096).decode())
        except TimeoutError:
            return found


def test_the_watchdog_is_fed_as_often_as_it_wants_and_no_more(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "40000000"})
    assert notifier.feed_every_s == 40.0 / FEEDS_IN_A_WINDOW
    for _ in range(5):  # a loop that turns quickly
        notifier.feed()
    assert heard(systemd) == ["WATCHDOG=1"]


def test_without_a_watchdog_none_is_fed(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})
    assert notifier.feed_every_s is None
    notifier.feed()
    notifier.ready()
    notifier.status("2 jobs\nin 3 slots")
    notifier.status("2 jobs in 3 slots")
    notifier.stopping()
    assert heard(systemd) == ["READY=1", "STATUS=2 jobs in 3 slots", "STOPPING=1"]


def test_a_systemd_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready()
    assert "systemd was not told 'READY=1'" in caplog.text
    Notifier({}).ready()
