"""A node leaves a job of replicas across nodes: its replica leaves as a whole, and its other part comes back."""

from __future__ import annotations

import signal

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.test_replicas import END_S, check, sharded


def test_a_node_leaves_and_its_replica_s_other_worker_joins_a_spare(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = sharded(job, "2:6", endpoints=etcd.endpoint)
    nodes = [one.start() for _ in range(5)]
    before = one.await_world(2, after_step=9)
    [spare] = [n for n in nodes if not n.says("form a replica")]
    ids = {n: n.workers[0].worker_id for n in nodes}
    leaver = next(n for n in reversed(nodes) if n is not spare)
    leaver.send(signal.SIGTERM)
    after = one.await_world(1, after_step=before)
    assert leaver.process.wait(END_S) == 0
    [mate] = [n for n in nodes if n.says("leaves, and with it the replica")]
    mate.await_line("worker in slot 0 has left; starting another")
    again = one.await_world(2, after_step=after)
    spare.await_line("form a replica")
    one.await_step(again + 2)
    assert not any(n.says("did not happen") for n in nodes), "no step was lost"
    one.finish(deadline_s=END_S)
    check(one, finished=4)
    assert ids[spare] and mate.says("form a replica", times=2)
