"""A node is lost, or leaves, after the end of the training, while the others' scripts go on."""

from __future__ import annotations

import signal
from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.job import Node
from tests.lab.wait import HANG_S, eventually

SCRIPT = Path(__file__).with_name("after_training.py")


def trained(job: MakeJob, etcd: EmbeddedEtcd, out: Path, *script: str) -> tuple[Node, Node]:
    """Returns the nodes of ranks 0 and 1 once both are trained."""
    out.mkdir()
    program = [str(SCRIPT), "--out", str(out), *script]
    one = job(endpoints=etcd.endpoint, nodes="2", program=program, options=["--shutdown-timeout", "2"])
    nodes = [one.start() for _ in range(2)]
    files = [out / f"trained-{rank}" for rank in range(2)]
    eventually(lambda: all(path.exists() for path in files), HANG_S, lambda: "both are trained")
    last = files[1].read_text()
    nodes.sort(key=lambda node: any(w.worker_id == last for w in node.workers))
    return nodes[0], nodes[1]


def test_a_collective_raises_and_the_script_saves_its_model(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    out = tmp_path / "after"
    _, lost = trained(job, etcd, out)
    lost.kill_agent()
    eventually((out / "saved").exists, HANG_S, lambda: "the other saved its model")
    for attempt in range(2):
        assert "the job is closing" in (out / f"lost-{attempt}").read_text()


def test_a_script_that_misses_a_worker_whose_node_left_ends_in_a_stopped_job(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    stays, leaves = trained(job, etcd, tmp_path / "after", "--uncaught")
    leaves.send(signal.SIGTERM)
    assert leaves.process.wait(HANG_S) == 128 + signal.SIGTERM
    assert stays.process.wait(HANG_S) == 0
    assert stays.says("JobClosing") and stays.says("training was done, but", "left before its script ended")
