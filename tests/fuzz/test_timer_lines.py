"""The FIFO of file timers against its workers: what is no request is said in few lines, and timers go on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.torchrun.file_timers import MOST_COMPLAINTS, FileTimers, parse_request
from tests.lab.wait import eventually

DEADLINE_S = 10.0
FUZZ = settings(max_examples=100)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "pid": VALUES | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**4000, "9", 1e400]),
        "scope_id": VALUES,
        "expiration_time": VALUES | st.sampled_from([0, -1, 1e308, "1"]),
        "signal": VALUES | st.sampled_from([0, 9, 64, 65, -9]),
    },
)


class Served:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[tuple[int, int]] = []
        self.timers = FileTimers(path, self._signal)
        self.timers.start()

    def _signal(self, pid: int, number: int) -> bool:
        self.asked.append((pid, number))
        return NodeWorkers._signal_process(cast(NodeWorkers, NO_WORKERS), pid, number)

    def write(self, *lines: bytes) -> None:
        with self.path.open("wb") as fifo:
            fifo.write(b"".join(line + b"\n" for line in lines))

    def check_served(self) -> None:
        """A timer that has expired comes up, so everything before it was read."""
        pid = 2**22 + 1 + len(self.asked)  # beyond what Linux gives to processes
        request = {"pid": pid, "scope_id": "s", "expiration_time": time.time() - 1, "signal": 9}
        self.write(b"", json.dumps(request).encode())
        eventually(lambda: (pid, 9) in self.asked, DEADLINE_S, "the timer expires")


# What NodeWorkers looks at: a worker whose process is none of this host's.
NO_WORKERS = SimpleNamespace(_workers={"w": SimpleNamespace(process=SimpleNamespace(pid=2**22))})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "timers")
    yield made
    made.timers.stop()
    assert not made.timers._thread.is_alive()


@given(lines=st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"")), max_size=5))
@example(lines=[b"[" * 3000])
@example(lines=[b"x" * 200_000])
@FUZZ
def test_lines_of_any_bytes(served: Served, lines: list[bytes]) -> None:
    served.write(*lines)
    served.check_served()


@given(requests=st.lists(REQUESTS, max_size=4))
@example(requests=[{"pid": 2**63, "scope_id": "s", "expiration_time": 1, "signal": 9}])
@example(requests=[{"pid": 10**4000, "scope_id": "s", "expiration_time": 1, "signal": 9}])
@FUZZ
def test_requests_with_anything_in_them(served: Served, requests: list[dict[str, object]]) -> None:
    """A huge pid is signalled to no process, and ends no thread."""
    served.write(*(json.dumps(request).encode() for request in requests))
    served.check_served()


def test_a_pid_that_no_process_can_have_is_asked_for_and_refused(served: Served) -> None:
    line = b'{"pid": 9223372036854775808, "scope_id": "s", "expiration_time": 1, "signal": 9}'
    assert parse_request(line) is not None
    served.write(line)
    served.check_served()
    assert (2**63, 9) in served.asked


def test_a_flood_of_lines_that_are_no_requests_is_few_lines_of_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        began_s = time.monotonic()
        for _ in range(20):
            served.write(*[b"nonsense"] * 500)
        served.check_served()
        took_s = time.monotonic() - began_s
    said = [record for record in caplog.records if "no request of a timer" in record.message]
    assert MOST_COMPLAINTS <= len(said) <= MOST_COMPLAINTS + 1 + took_s
    assert str(served.path) in said[0].getMessage()
