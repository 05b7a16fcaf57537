"""A node is lost after the end of the training, while the others' scripts go on."""

from __future__ import annotations

from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.lab.wait import HANG_S, eventually

SCRIPT = Path(__file__).with_name("after_training.py")


def test_a_collective_raises_and_the_script_saves_its_model(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    out = tmp_path / "after"
    out.mkdir()
    one = job(endpoints=etcd.endpoint, nodes="2", program=[str(SCRIPT), "--out", str(out)])
    nodes = [one.start() for _ in range(2)]
    trained = [out / f"trained-{rank}" for rank in range(2)]
    eventually(lambda: all(path.exists() for path in trained), HANG_S, lambda: "both are trained")
    last = trained[1].read_text()
    [lost] = [node for node in nodes if any(w.worker_id == last for w in node.workers)]
    lost.kill_agent()
    eventually((out / "saved").exists, HANG_S, lambda: "the other saved its model")
    for attempt in range(2):
        assert "the job is closing" in (out / f"lost-{attempt}").read_text()
