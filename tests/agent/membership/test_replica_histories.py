"""Thousands of invented histories of a job of replicas of two: A1, A2 and all that test_histories.py asserts."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from simulated_job import POLICY
from simulated_replicas import SimulatedReplicaJob
from test_histories import Histories

SIZE = 2


class ReplicaHistories(Histories):
    """slots 1: each replica spans two nodes; 2: each node has one."""

    @initialize(
        least=st.integers(1, 2),
        extra=st.integers(0, 3),
        nodes=st.integers(2, 4),
        slots=st.integers(1, 2),
        running=st.sampled_from([True, True, True, False]),
        asks=st.booleans(),
        has_checkpoints=st.booleans(),
    )
    def start(  # type: ignore[override]
        self, least: int, extra: int, nodes: int, slots: int, running: bool, asks: bool, has_checkpoints: bool
    ) -> None:
        self.slots = slots
        least = 2 if slots == 1 else least
        self.job = SimulatedReplicaJob(
            least, least + extra, asks=asks, has_checkpoints=has_checkpoints, replica_size=SIZE
        )
        for _ in range(nodes):
            self.job.add_node(slots)
        self.job.elect(self.job.nodes["a0"], fresh=False)
        for _ in range(10 if running else 0):
            self.job.settle()

    @rule()
    def join(self) -> None:  # type: ignore[override]
        if len(self.job.nodes) < 6:
            self.job.add_node(self.slots)

    @rule(least=st.integers(1, 3), extra=st.integers(0, 2))
    def scale(self, least: int, extra: int) -> None:
        least = 2 if self.slots == 1 else least
        self.job.scale(least, least + extra)

    def teardown(self) -> None:
        """The trouble is over: the job must go on, or have a reason not to."""
        if not hasattr(self, "job"):
            return
        job = self.job
        for node in job.nodes.values():
            node.silent = node.storeless = False
        job.cuts.clear()
        for passed_s in (0.0, POLICY.quarantine_longest_s):  # a node that was left out may come back
            job.now_s += passed_s
            for _ in range(60):
                job.settle()
        enough = [n for n in job.nodes.values() if n.alive and not n.leaving]
        if job.result is not None:
            self.check_result(enough)
            return
        size = min(len(enough), job.max_nodes)
        size = size if self.slots == SIZE else size // SIZE * SIZE
        if size < job.min_nodes:
            return
        before = job.committed
        job.settle()
        if job.committed == before:
            # no holder is left: the leader waits for one, and says so
            assert not self.holder_lives(), self.story()
            return
        record = job.generation
        assert record is not None
        assert record.node_count == size, self.story()
        assert {m.agent_id for m in record.members} <= {n.agent_id for n in enough}


ReplicaHistories.TestCase.settings = settings(
    max_examples=int(os.environ.get("BAGUA_HISTORIES", "60")) // 2,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestReplicaHistories = ReplicaHistories.TestCase
del Histories  # it is another file's test
