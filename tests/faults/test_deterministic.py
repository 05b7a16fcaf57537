"""A deterministic job ends with the bits of one worker's job, whatever happened to its workers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults import drawn_faults
from tests.faults.conftest import MakeJob
from tests.faults.job import Job
from tests.lab.network import Host, Lab

SCRIPT = Path(__file__).with_name("train_deterministic.py")
OPTIONS = ("--deterministic", "--digest-every", "5")


def made(job: MakeJob, model: str = "norm", **more: Any) -> Job:
    return job(file=SCRIPT, options=OPTIONS, script=["--model", model], **more)


def digest_of(one: Job, workers: int) -> str:
    """Of the job that has ended with so many workers."""
    one.check(finished=workers)
    ends = one.ends()
    assert {end["shards"] for end in ends} == {"8"}
    return str(ends[0]["parameters"])


def digest_alone(job: MakeJob, workers: int = 1, **more: Any) -> str:
    one = made(job, **more)
    one.hurry()
    one.start(slots=workers)
    one.finish()
    assert {line.world_size for line in one.ledger.lines} == {workers}, "a fault in the run to compare with"
    return digest_of(one, workers)


def test_a_job_that_lost_a_worker_ends_with_the_bits_of_one_worker(job: MakeJob) -> None:
    sizes = {"samples": 480, "epochs": 1}
    alone = digest_alone(job, **sizes)
    one = made(job, **sizes)
    node = one.start(slots=3)
    one.await_step(4)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    alive = one.await_world(2)
    one.await_world(3, after_step=alive)
    one.finish()
    assert node.missed_a_peer
    assert digest_of(one, 3) == alone


def test_a_checkpoint_goes_on_with_another_number_of_workers(job: MakeJob, tmp_path: Path) -> None:
    sizes = {"samples": 480, "epochs": 1}
    alone = digest_alone(job, **sizes)
    saved = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "4")
    one = job(file=SCRIPT, options=(*OPTIONS, *saved), **sizes)
    first = one.start(slots=2)
    one.await_step(6)
    first.send(signal.SIGINT)
    first.await_line("stopped: every worker left; the checkpoint of step")
    first.process.wait(30.0)
    stopped = one.step
    assert 6 <= stopped < 20 and not one.ends(), "it was stopped before its end"
    one.hurry()
    second = one.start(slots=3)
    assert second.process.wait(60.0) == 0, second.log
    assert second.says("goes on from the checkpoint of step")
    assert {line.world_size for line in one.ledger.lines} == {2, 3}
    assert digest_of(one, 3) == alone


@pytest.mark.parametrize("silence", [Host.cut, Host.freeze], ids=["cut", "frozen"])
def test_a_host_that_is_silent_for_a_while_changes_no_bit(
    job: MakeJob, lab: Lab, silence: Callable[[Host], None]
) -> None:
    alone = digest_alone(job)
    one = made(job, endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    nodes = [one.start(host) for host in lab.hosts[1:]]
    one.await_world(2, after_step=one.await_step(5))
    host = lab.hosts[2]
    silence(host)
    nodes[0].await_line("lost", "1 worker on 1 node")
    lost = one.await_world(1, after_step=one.last_world(2))
    (host.heal if silence is Host.cut else host.thaw)()
    one.await_world(2, after_step=lost)
    assert nodes[0].missed_a_peer
    one.finish()
    assert digest_of(one, 2) == alone


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [("OMP_NUM_THREADS", "2", "threads"), ("ATEN_CPU_CAPABILITY", "default", "processor")],
)
def test_a_worker_of_other_threads_or_instructions_is_refused_and_the_job_goes_on(
    job: MakeJob, etcd: EmbeddedEtcd, variable: str, value: str, field: str
) -> None:
    """torch itself computes otherwise under these variables."""
    sizes = {"samples": 480, "epochs": 1}
    alone = digest_alone(job, **sizes)
    one = made(job, endpoints=etcd.endpoint, nodes="1:2", **sizes)
    node = one.start()
    one.await_step(3)
    other = one.start(environment={variable: value})
    other.await_line("may not join", f"{field}: the job has ")
    one.await_step(one.step + 2)
    one.hurry()
    assert node.process.wait(60.0) == 0, node.log
    other.process.wait(60.0)
    assert {line.world_size for line in one.ledger.lines} == {1}, "it took part in no step"
    assert digest_of(one, 1) == alone


# A line is one write, since the agent has lines on the same terminal.
REFUSED_IN_A_LOOP = """
import torch
import bagua_core as bagua
from bagua_core.errors import NotDeterministicError

bagua.init_process_group()
print(f"shards: {bagua.virtual_shards()} threads: {torch.get_num_threads()}", flush=True)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    bagua.DistributedDataParallel(net, [optimizer], algorithm="bytegrad")
except NotDeterministicError as error:
    print(f"refused: {error}", flush=True)
model = bagua.DistributedDataParallel(net, [optimizer])
try:
    bagua.next_step()
except NotDeterministicError as error:
    print(f"refused: {error}", flush=True)
data = torch.utils.data.TensorDataset(torch.ones(16, 2))
for (x,) in bagua.ElasticDataLoader(data, 8):
    try:
        bagua.allreduce(torch.ones(1))
    except NotDeterministicError as error:
        print(f"refused: {error}", flush=True)
    model(x).sum().backward()
    optimizer.step()
"""


def test_what_has_no_fixed_order_is_refused_in_a_job(job: MakeJob, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED_IN_A_LOOP)
    one = job(options=("--deterministic", "--virtual-shards", "2"), program=[str(script)])
    node = one.start()
    assert node.process.wait(60.0) == 0, node.log
    assert node.says("shards: 2 threads: 1")
    for words in ("algorithm 'bytegrad(", "only bagua.ElasticDataLoader does"):
        assert node.says("refused:", words)
    assert node.says("refused:", "in the loop of a deterministic job", times=4), "once a shard of two steps"


def test_a_script_that_is_restarted_after_a_change_is_refused(job: MakeJob, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('no session')\n")
    one = job(options=OPTIONS, program=[str(script)])
    node = one.start()
    assert node.process.wait(30.0) != 0
    assert node.says("a deterministic job's script calls bagua_core.init_process_group")


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [("norm", 1), ("digits", 2), ("characters", 3)])
def test_one_to_four_workers_and_a_job_with_many_faults(
    job: MakeJob, etcd: EmbeddedEtcd, model: str, seed: int
) -> None:
    if model == "digits":
        pytest.importorskip("sklearn")
    sizes = {"samples": drawn_faults.SAMPLES}
    digests = {workers: digest_alone(job, workers, model=model, **sizes) for workers in (1, 2, 3, 4)}
    assert len(set(digests.values())) == 1, digests
    options = (*OPTIONS, *drawn_faults.HANG_OPTIONS)
    one = job(
        file=SCRIPT,
        options=options,
        script=["--model", model],
        endpoints=etcd.endpoint,
        nodes=drawn_faults.NODES,
        **sizes,
    )
    faults = drawn_faults.draw(seed)
    print(drawn_faults.in_words(seed, faults))
    drawn_faults.perform(one, faults, etcd, deadline_s=60.0)
    assert one.ends()[0]["parameters"] == digests[1]
