"""What pages print of lost workers, of scripts that fail, and of the quickstart is what real jobs of one node print."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.printed import printed_lines
from tests.docs.printed_lines import GAP, missing
from tests.docs.terminals import STRIKES, Since, Terminals, shows
from tests.faults.conftest import MakeJob, job
from tests.faults.job import DEADLINE_S, ROOT, START_S
from tests.lab.launched import launch
from tests.lab.wait import eventually

__all__ = ["job"]

# Does what a file in its directory asks for, with the rank in the file's name.
TRAIN = """
import sys, time
from pathlib import Path
import torch
import bagua_core as bagua

bagua.init_process_group()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = bagua.DistributedDataParallel(model, [optimizer])
samples = torch.utils.data.TensorDataset(torch.randn(40000, 4))

def asked(what):
    file = Path(sys.argv[1]) / f"{what}-{bagua.get_rank()}"
    return file.exists() and not file.unlink()

loader = bagua.ElasticDataLoader(samples, global_batch_size=4)
for (x,) in loader:
    (Path(sys.argv[1]) / f"step-{bagua.get_rank()}").write_text(str(loader.step))
    if asked("stay"):
        time.sleep(600)
    optimizer.zero_grad()
    wrapped(x).mean().backward()
    optimizer.step()
    assert not asked("raise"), "a bug"
    if asked("hang"):
        time.sleep(600)
    if asked("disagree"):
        bagua.allreduce(torch.ones(1))
    time.sleep(0.1)
"""


class OneNode:
    """A job of two workers of TRAIN on this machine, which goes on from its checkpoints."""

    def __init__(self, make: MakeJob, directory: Path) -> None:
        self.directory = directory
        script = directory / "train.py"
        script.write_text(TRAIN)
        options = [
            "--hang-timeout",
            "5",
            "--checkpoint-dir",
            str(directory / "saved"),
            "--checkpoint-every",
            "10",
        ]
        self.job = make(program=[str(script), str(directory)], options=options)
        self.start()

    def start(self, *options: str) -> list[str]:
        self.node = self.job.start(slots=2, options=options)
        self.node.await_line("is in force")
        return [self.node.log]

    def ask(self, what: str, rank: int) -> None:
        (self.directory / f"{what}-{rank}").touch()

    def lose(self, act: Callable[[], None]) -> Terminals:
        """A worker, in whose slot another joins."""
        self.job.await_world(2)
        own = Since(self.node)
        act()
        self.job.await_world(1)
        self.job.await_world(2)
        own.await_all("adds ")
        return [own()]

    def kill_in_step(self) -> None:
        """The other worker waits in the step's reduction, so its step does not happen."""
        self.ask("stay", 1)
        eventually(
            lambda: not (self.directory / "stay-1").exists(), DEADLINE_S, "no worker of rank 1 stays", 0.02
        )
        steps = [self.directory / f"step-{rank}" for rank in (0, 1)]
        eventually(
            lambda: len({file.read_text() for file in steps}) == 1,
            DEADLINE_S,
            "rank 0 is not in that step",
            0.02,
        )
        self.node.workers[1].kill()

    def lose_state(self) -> Terminals:
        """In one moment all workers are killed."""
        eventually((self.directory / "saved").exists, START_S, "a directory of checkpoints", 0.05)
        self.job.await_step(self.job.step + 12)
        own = Since(self.node)
        for worker in self.node.workers:
            worker.kill()
        own.await_all("is in force")
        return [own()]

    def stop(self) -> Terminals:
        own = Since(self.node)
        self.node.send(signal.SIGTERM)
        assert self.node.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        return [own(), self.start()]

    def fail(self, what: str, rank: int) -> Terminals:
        """The job ends; what is struck next finds it started again."""
        if not self.node.process.is_running:
            self.start()
        own = Since(self.node)
        self.ask(what, rank)
        assert self.node.process.wait(DEADLINE_S) == 1
        return [own()]


def test_faults_of_workers_and_scripts(job: MakeJob, tmp_path: Path) -> None:
    one = OneNode(job, tmp_path)
    shows(
        printed_lines("docs/guide/what-happens.md", "a worker is killed"),
        lambda: one.lose(one.kill_in_step),
    )
    shows(
        printed_lines("docs/guide/what-happens.md", "a worker hangs"),
        lambda: one.lose(lambda: one.ask("hang", 1)),
    )
    shows(printed_lines("docs/guide/what-happens.md", "every state is lost"), one.lose_state)
    shows(printed_lines("docs/guide/what-happens.md", "the only node is stopped"), one.stop)
    shows(printed_lines("docs/guide/what-happens.md", "the script raises"), lambda: one.fail("raise", 1))
    one.start("--max-restarts", str(STRIKES))
    shows(
        printed_lines("docs/guide/what-happens.md", "the script raises and starts again"),
        lambda: one.lose(lambda: one.ask("raise", 1)),
    )
    ended = one.fail("disagree", 0)
    shows(printed_lines("docs/guide/what-happens.md", "ranks disagree"), lambda: ended)
    shows(printed_lines("docs/collectives.md", "ranks disagree"), lambda: ended)


@pytest.mark.long
def test_the_quickstart() -> None:
    """Its job of examples/char_lm.py; tests/packaging has the rest."""
    head, *lines = printed_lines("README.md", "the quickstart").splitlines()
    done = launch(*shlex.split(head.partition(".venv/bin/bagua-launch ")[2]), directory=ROOT)
    assert done.returncode == 0, done.said
    assert missing([line for line in lines if line != GAP], done.said) == [], done.said
