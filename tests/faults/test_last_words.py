"""The store does not answer when a node ends: the end is bounded, said, and keeps its exit code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.lab.wait import eventually

END_S = 15.0


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd.start()
    yield server
    os.kill(server.pid, signal.SIGCONT)
    server.stop()


def test_an_etcd_that_freezes_at_the_end_is_not_waited_for(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1")
    node = one.start()
    one.await_world(1)
    os.kill(etcd.pid, signal.SIGSTOP)
    node.send(signal.SIGTERM)
    eventually(lambda: node.says("leaving"), 5.0, lambda: "the first signal taken", 0.01)
    began = time.monotonic()
    node.send(signal.SIGTERM)
    assert node.process.wait(END_S) == 128 + signal.SIGTERM
    print(f"ended after {time.monotonic() - began:.1f} s")
    told = (
        "timed out writing this node's final state",
        "etcd does not answer",
        "etcd did not remove this node's key",
    )
    assert any(node.says(line) for line in told), "which of them depends on what was still to be written"
    one.check_nothing_left()
