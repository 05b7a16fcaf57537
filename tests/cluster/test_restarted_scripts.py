"""A submitted script that knows nothing of this runtime: its workers start again for each change of its nodes."""

from __future__ import annotations

from bagua_agent.cluster_client import cluster_requests
from tests.cluster.cluster import DEADLINE_S, POLL_S, SubmittedJob
from tests.cluster.conftest import MakeCluster
from tests.cluster.test_cluster_commands import JOB, Terminal
from tests.lab.wait import eventually

WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1], "hurry").exists():
    time.sleep(0.05)
"""


def test_a_drained_node_is_left_at_the_jobs_maximum(make_cluster: MakeCluster) -> None:
    terminal = Terminal(make_cluster(2))
    cluster = terminal.cluster
    (terminal.directory / "waits.py").write_text(WAITS)
    job = SubmittedJob(cluster, "plain", samples=0, epochs=0)
    terminal.said("submit", "--name", job.job_id, "--nproc-per-node", "1", *JOB, "waits.py", str(job.out))
    eventually(job.generations, DEADLINE_S, lambda: f"the job begins\n{cluster.logs()}", POLL_S)
    (there,) = job.nodes
    cluster_requests.drain(cluster.store, there, force=False, reason="")
    eventually(
        lambda: job.nodes not in ([], [there]) and there not in job.nodes,
        DEADLINE_S,
        lambda: f"{there} is left\n{cluster.logs()}",
        POLL_S,
    )
    (after,) = job.nodes
    eventually(
        lambda: {m.node_name for m in job.generations()[-1].members} == {after},
        DEADLINE_S,
        lambda: f"the job goes on on {after}\n{cluster.logs()}",
        POLL_S,
    )
    job.hurry()
    assert job.await_outcome().exit_code == 0
    assert all(g.members for g in job.generations()), "the job was never without a node"
    cluster.await_idle()
