"""A node that its daemon finds in trouble twice running is so for the cluster, with the reason, until it is mended."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.observation.cluster_status import cluster_status
from bagua_agent.service.state_machine import machine
from tests.agent.service.daemon_here import running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 20.0
FULL = "disk: only 0.1 GB free in /var/log; make room"


class Looks:
    """At the node: full once and not again, then twice running, then mended when the test says so."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ...]] = []
        self.mended = threading.Event()

    def __call__(self) -> tuple[str, ...]:
        full = len(self.found) == 0 or (len(self.found) > 2 and not self.mended.is_set())
        self.found.append((FULL,) if full else ())
        return self.found[-1]


def test_two_looks_agree_before_a_node_is_in_trouble_and_after(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_EVERY_S", "LOOK_AGAIN_S"):
        monkeypatch.setattr(machine, name, 0.1)
    looks = Looks()

    def is_so(state: str, reason: str) -> bool:
        return [(n.state, n.reason) for n in cluster_status(plain_store, complain=print).nodes] == [
            (state, reason)
        ]

    with running_daemon(plain_etcd, plain_store, tmp_path, looks) as said:

        def told() -> str:
            return (
                f"said {said}; looks {looks.found}; nodes {cluster_status(plain_store, complain=print).nodes}"
            )

        eventually(lambda: is_so("trouble", FULL), DEADLINE_S, told)
        assert looks.found[:2] == [(FULL,), ()] and len(looks.found) >= 5, "one look was not enough"
        looks.mended.set()
        eventually(lambda: is_so("ready", ""), DEADLINE_S, told)
        assert [line for line in said if "trouble" in line] == [f"in trouble: {FULL}", "in trouble no more"]
