"""All workers leave on purpose: the state of the last step is saved, and the next start under the job's id begins at
once and says from where."""

from __future__ import annotations

import signal
from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node
from tests.faults.saved_steps import newest_step
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

CATCHING = Path(__file__).with_name("train_until_told.py")
SAMPLES = 1200
LEAVE_S = 25.0  # a leave takes moments; this bounds it below the grace period of 30 s
START_S = 90.0  # imports on a busy machine


def leave(node: Node, number: signal.Signals) -> None:
    node.send(number)
    assert node.process.wait(LEAVE_S) == 128 + number
    assert not node.says("did not happen") and not node.says("Traceback")


def test_the_only_node_saves_its_last_step(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    one = job(samples=SAMPLES, options=["--checkpoint-dir", str(saved)])
    node = one.start(slots=2)
    one.await_step(10, START_S)
    leave(node, signal.SIGTERM)
    step = newest_step(saved)
    assert one.step <= step <= one.step + 1, "the last step's lines may be written by the next run"
    assert node.says(f"the checkpoint of step {step} is written")
    one.hurry()
    again = one.start(slots=2)
    assert again.process.wait(120) == 0
    assert again.says(f"goes on from the checkpoint of step {step}")
    assert one.ledger.voided == (), "no step is done twice"
    one.check(finished=2)


def test_the_next_start_after_ctrl_c_begins_anew_at_once(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = job(samples=SAMPLES, endpoints=etcd.endpoint)
    node = one.start()
    one.await_step(5, START_S)
    leave(node, signal.SIGINT)
    assert node.says("stopped: every worker left")
    one.hurry()
    again = one.start()
    again.await_line("was stopped before", "begins anew", deadline_s=START_S)
    again.await_line("generation 2 is in force", deadline_s=START_S)
    assert not again.says("holds the state"), "no worker is waited for"
    assert again.process.wait(120) == 0


def test_two_nodes_are_stopped_one_after_the_other_and_started_again(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    options = ["--checkpoint-dir", str(saved)]
    one = job(samples=SAMPLES, endpoints=etcd.endpoint, nodes="2", options=options)
    nodes = [one.start(), one.start()]
    one.await_world(2, deadline_s=START_S)
    one.await_step(5, START_S)
    nodes[0].send(signal.SIGINT)
    nodes[0].await_line("leaving")
    nodes[1].send(signal.SIGINT)
    assert [node.process.wait(LEAVE_S) in (0, 130) for node in nodes] == [True, True]
    step = newest_step(saved)
    assert one.step <= step <= one.step + 1
    one.hurry()
    again = [one.start(), one.start()]
    for node in again:
        node.await_line("generation 2 is in force", deadline_s=START_S)
        assert not node.says("holds the state"), "no worker is waited for"
    assert [node.process.wait(120) for node in again] == [0, 0]
    assert any(node.says(f"goes on from the checkpoint of step {step}") for node in again)
    assert one.ledger.voided == ()
    one.check(finished=2)


def told(one: Job, slots: int = 2) -> list[str]:
    return [(one.out / f"ends-{slot}").read_text() for slot in range(slots)]


def catching(job: MakeJob, out: Path, *more: str, options: tuple[str, ...] = ()) -> Job:
    out.mkdir()
    one = job(program=[str(CATCHING), "--out", str(out), *more], options=options)
    one.out = out
    return one


def test_the_script_sees_ctrl_c_after_the_checkpoint(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    one = catching(job, tmp_path / "out", options=("--checkpoint-dir", str(saved)))
    node = one.start(slots=2)
    one.await_step(5, START_S)
    leave(node, signal.SIGINT)
    step = newest_step(saved)
    assert step >= 5 and told(one) == [f"LeaveInterrupt after step {step - 1}"] * 2
    assert not node.says("--shutdown-timeout")
    one.check_nothing_left()


def test_a_second_ctrl_c_interrupts_the_script_and_a_third_kills(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    one = catching(
        job,
        tmp_path / "out",
        "--hang-at",
        "3",
        options=("--checkpoint-dir", str(saved), "--shutdown-timeout", "300"),
    )
    node = one.start(slots=2)
    eventually(
        lambda: (one.out / "hangs-0").exists() and (one.out / "hangs-1").exists(), START_S, "both hang", 0.05
    )
    node.send(signal.SIGINT)
    node.await_line("leaving at the next step boundary; a second Ctrl-C interrupts the script")
    assert not list(one.out.glob("ends-*"))
    node.send(signal.SIGINT)
    node.await_line("SIGINT to the workers")
    assert node.process.wait(LEAVE_S) == 130
    assert told(one) == ["KeyboardInterrupt after step 3"] * 2
    assert node.says("the job is not marked stopped", "none confirmed a last checkpoint")
    one.check_nothing_left()


PLAIN = """
import sys, time
from pathlib import Path
out = Path(sys.argv[1])
(out / "runs").touch()
try:
    time.sleep(600)
except KeyboardInterrupt:
    (out / "ends-0").write_text("KeyboardInterrupt")
    raise
"""


def test_in_restart_mode_ctrl_c_reaches_the_script_as_under_torchrun(job: MakeJob, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    one = job(program=[str(script), str(tmp_path)])
    one.out = tmp_path
    node = one.start()
    eventually(lambda: (tmp_path / "runs").exists(), START_S, "the script runs", 0.05)
    node.send(signal.SIGINT)
    assert node.process.wait(LEAVE_S) == 130
    assert told(one, slots=1) == ["KeyboardInterrupt"]
    one.check_nothing_left()


BETWEEN_EPOCHS = """
import sys, time
from pathlib import Path
import torch
import bagua_core as bagua

class Count:
    ended = 0
    def state_dict(self): return {"ended": self.ended}
    def load_state_dict(self, state): self.ended = state["ended"]

out, count = Path(sys.argv[1]), Count()
bagua.init_process_group()
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
bagua.register_state("count", count)
samples = torch.utils.data.TensorDataset(torch.ones(8, 4))
loader = bagua.ElasticDataLoader(samples, global_batch_size=8, seed=1)
for epoch in loader.epochs(100):
    with (out / "epochs").open("a") as file:
        print(epoch, count.ended, file=file)
    for (x,) in loader:  # one step
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    count.ended += 1
    if not (out / "hurry").exists():
        time.sleep(0.05)
"""


def test_what_a_script_does_between_epochs_is_in_the_last_checkpoint(job: MakeJob, tmp_path: Path) -> None:
    """Every boundary ends an epoch here."""
    script, seen = tmp_path / "epochs.py", tmp_path / "epochs"
    script.write_text(BETWEEN_EPOCHS)
    one = job(program=[str(script), str(tmp_path)], options=["--checkpoint-dir", str(tmp_path / "saved")])
    node = one.start()
    eventually(lambda: seen.exists() and seen.read_text().count("\n") > 5, START_S, "epochs", 0.02)
    leave(node, signal.SIGTERM)
    (tmp_path / "hurry").touch()
    again = one.start()
    assert again.process.wait(120) == 0 and again.says("goes on from the checkpoint of step")
    epochs = [tuple(map(int, line.split())) for line in seen.read_text().splitlines()]
    # the epoch that had begun when the node left begins again
    assert sorted(set(epochs)) == [(epoch, epoch) for epoch in range(100)]


FAILS = """
import os, signal, sys, time
from pathlib import Path
out, rank, world = Path(sys.argv[1]), os.environ["RANK"], int(os.environ["WORLD_SIZE"])
if rank == "0":
    while len(list(out.glob("asks-*"))) < world - 1:
        time.sleep(0.02)
    sys.exit(7)


def save(number, frame):
    (out / f"saves-{rank}").touch()
    time.sleep(600)


signal.signal(signal.SIGTERM, save)
(out / f"asks-{rank}").touch()
while True:
    time.sleep(600)
"""


def await_saves(directory: Path, *nodes: Node) -> None:
    def save() -> bool:
        return len(list(directory.glob("saves-*"))) == len(nodes)

    eventually(save, START_S, lambda: "\n".join(["all save", *(node.log for node in nodes)]), 0.05)


def test_a_second_signal_kills_workers_that_save_after_a_failure(job: MakeJob, tmp_path: Path) -> None:
    """The first one asks for what they do already. They would have until --shutdown-timeout."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    one = job(program=[str(script), str(tmp_path)], options=("--shutdown-timeout", "600"))
    node = one.start(slots=2)
    await_saves(tmp_path, node)
    node.send(signal.SIGTERM)
    node.await_line("SIGTERM: the workers here were asked to end", "a second signal ends it at once")
    node.send(signal.SIGTERM)
    assert node.process.wait(LEAVE_S) == 7
    one.check_nothing_left()


def test_a_signal_after_a_failure_ends_the_host_of_etcd_before_the_other_node(
    job: MakeJob, tmp_path: Path
) -> None:
    """Without one it would wait for the other node's workers, which save too."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("--rdzv-backend", "c10d", "--shutdown-timeout", "600")
    one = job(program=[str(script), str(tmp_path)], nodes="2", endpoints=endpoint, options=options)
    host = one.start(slots=2)
    host.await_line("this node leads", deadline_s=START_S)
    other = one.start()
    await_saves(tmp_path, host, other)
    for node in (host, other):
        node.send(signal.SIGTERM)
        node.await_line("SIGTERM: the workers here were asked to end")
        node.send(signal.SIGTERM)
        assert node.process.wait(LEAVE_S) == 7
    one.check_nothing_left()
