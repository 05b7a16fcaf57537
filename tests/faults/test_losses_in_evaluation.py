"""Nodes are lost during a collective between two epochs, and the job can't go on with those that are left, or does."""

from __future__ import annotations

import signal
from pathlib import Path

from click.testing import CliRunner

from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_launch.main import cli
from tests.faults.conftest import MakeJob
from tests.faults.job import Node
from tests.lab.wait import HANG_S, eventually

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import bagua_core as bagua

out, part, worker = Path(sys.argv[1]), os.environ["PART"], os.environ["BAGUA_WORKER_ID"]
(out / f"starts-{part}-{worker}").touch()
bagua.init_process_group()
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(torch.ones(24, 1), global_batch_size=12, seed=0)
for epoch in loader.epochs(2):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    if epoch == 0:
        (out / f"there-{part}-{worker}").touch()
        while not part.startswith("stays") and not (out / "go").exists():
            time.sleep(0.02)
        total = bagua.allreduce(torch.ones(1)).item()
        (out / f"total-{part}-{worker}").write_text(f"{total} by rank {bagua.get_rank()}")
    if epoch == 0 and part == "stays alone":
        while not list(out.glob("total-frozen-*")):
            time.sleep(0.02)
    if epoch == 0 and part.endswith("ends early") and total == 1.0:
        break
    if epoch == 0 and part == "stays for the next":
        while len(list(out.glob("starts-*ends early-*"))) < 2:
            time.sleep(0.02)
"""


def test_the_workers_that_keep_the_state_wait_in_the_collective_and_repeat_it(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    out = tmp_path / "evaluated"
    out.mkdir()
    (script := tmp_path / "evaluates.py").write_text(SCRIPT)
    options = ["--shutdown-timeout", str(HANG_S)]
    one = job(endpoints=etcd.endpoint, nodes="3", program=[str(script), str(out)], options=options)
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    store.connect(HANG_S)

    def newest() -> Generation:
        found = store.get(JobKeys(one.job_id).generation)
        assert found is not None
        return Generation.from_proto(pb.Generation.FromString(found.value))

    def started(part: str, slots: int = 1) -> Node:
        return one.start(slots=slots, environment={"PART": part})

    stays, leaves, loses = started("stays", 2), started("leaves"), started("loses")
    eventually(lambda: len(list(out.glob("there-*"))) == 4, HANG_S, lambda: "all are between two epochs")
    leaves.send(signal.SIGTERM)
    eventually(lambda: not newest().members, HANG_S, lambda: "the leave is pending, since a worker waits")
    loses.workers[0].kill()
    eventually(lambda: newest().kind.name == "FAILOVER", HANG_S, lambda: "the loss is known")
    assert not newest().members
    (out / "go").touch()
    assert leaves.process.wait(HANG_S) == 0, leaves.log
    assert not list(out.glob("total-stays-*")), "they wait for the next generation"
    last = started("comes")
    for node in (stays, loses, last):
        assert node.process.wait(HANG_S) == 0, node.log
    assert sorted(path.read_text() for path in out.glob("total-stays-*")) == [
        "2.0 by rank 0",
        "2.0 by rank 1",
    ]


def test_a_worker_that_the_others_went_on_without_is_not_rank_0(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Its host was silent for longer than its agent's lease lasts. Its rank was 0 before, or another one."""
    out = tmp_path / "evaluated"
    out.mkdir()
    (script := tmp_path / "evaluates.py").write_text(SCRIPT)
    one = job(endpoints=etcd.endpoint, nodes="3", program=[str(script), str(out)])
    stay = [one.start(environment={"PART": "stays alone"}) for _ in range(2)]
    frozen = one.start(environment={"PART": "frozen"})
    eventually(lambda: len(list(out.glob("there-*"))) == 3, HANG_S, lambda: "all are between two epochs")
    words = [
        "scale",
        "--rdzv-endpoint",
        etcd.endpoint,
        one.job_id,
        "2:3",
    ]  # only now: the first three begin together
    assert CliRunner().invoke(cli, words).exit_code == 0
    worker = frozen.workers[0]
    worker.send(signal.SIGSTOP)
    frozen.freeze_agent()
    eventually(lambda: len(list(out.glob("total-stays alone-*"))) == 2, HANG_S, lambda: "the others went on")
    (out / "go").touch()
    frozen.thaw_agent()
    worker.send(signal.SIGCONT)
    for node in (*stay, frozen):
        assert node.process.wait(HANG_S) == 0, node.log
    totals = sorted(path.read_text() for path in out.glob("total-*"))
    assert totals == ["1.0 by rank 2", "2.0 by rank 0", "2.0 by rank 1"]
    assert frozen.says("the job went on without this worker meanwhile")


def test_the_slot_of_a_worker_that_ends_by_a_value_of_its_own_gets_another(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """The others went on without it, so its value differs from theirs, and its script leaves the loop."""
    out = tmp_path / "evaluated"
    out.mkdir()
    (script := tmp_path / "evaluates.py").write_text(SCRIPT)
    one = job(endpoints=etcd.endpoint, nodes="3", program=[str(script), str(out)])
    stay = [one.start(environment={"PART": "stays for the next"}) for _ in range(2)]
    frozen = one.start(environment={"PART": "frozen, ends early"})
    eventually(lambda: len(list(out.glob("there-*"))) == 3, HANG_S, lambda: "all are between two epochs")
    words = [
        "scale",
        "--rdzv-endpoint",
        etcd.endpoint,
        one.job_id,
        "2:3",
    ]  # only now: the first three begin together
    assert CliRunner().invoke(cli, words).exit_code == 0
    worker = frozen.workers[0]
    worker.send(signal.SIGSTOP)
    frozen.freeze_agent()
    eventually(lambda: len(list(out.glob("total-stays*"))) == 2, HANG_S, lambda: "the others went on")
    (out / "go").touch()
    frozen.thaw_agent()
    worker.send(signal.SIGCONT)
    frozen.await_line(
        "ended with 0 after the job had gone on without it; starting another", deadline_s=HANG_S
    )
    for node in (*stay, frozen):
        assert node.process.wait(HANG_S) == 0, node.log
