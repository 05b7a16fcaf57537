"""Every holder is gone, and the job goes on from its newest checkpoint, as if nothing had been."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from tests.docs.printed import printed
from tests.faults.conftest import MakeJob
from tests.faults.job import SCRIPT, START_S, Job
from tests.faults.saved_steps import newest_step
from tests.lab.wait import eventually

SAMPLES = 720
EPOCHS = 2
LAST_STEP = EPOCHS * SAMPLES // 24


def make(job: MakeJob, directory: Path) -> Job:
    given = {"500": "7", "train.py": str(SCRIPT), "/shared/demo": str(directory)}
    *options, script = printed("docs/training-script.md", "--checkpoint-every 500", given)
    return job(samples=SAMPLES, epochs=EPOCHS, options=options, file=Path(script))


def copy_of_newest(saved: Path, target: Path) -> int:
    """Copy a complete checkpoint out of a directory in use; its step."""

    def copied() -> int:
        found = (
            [f.place for f in catalogue.find(LocalStorage(saved)) if f.is_complete] if saved.is_dir() else []
        )
        if not found:
            return 0
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(saved / found[0].directory_name, target / found[0].directory_name)
        except (shutil.Error, OSError):
            return 0  # it was removed meanwhile
        return found[0].name.step

    return eventually(copied, START_S, "a complete checkpoint", 0.05)


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    what = ("parameters", "optimizer", "scheduler", "steps_of_scheduler", "steps_of_optimizer")
    return all(one[key] == other[key] for key in what)


def kill_whole(one: Job) -> None:
    """The agent and all its workers, at once."""
    node = one.nodes[-1]
    family = node.family
    node.kill_agent()
    assert node.process.wait(10) == -signal.SIGKILL
    eventually(lambda: not Job.alive(family), 10, "its workers have ended too")


def test_a_job_killed_whole_goes_on_from_its_checkpoint(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    one = make(job, saved)
    one.start(slots=2)
    early = copy_of_newest(saved, tmp_path / "early")
    one.await_step(LAST_STEP // 2 + 10)  # in the second epoch
    kill_whole(one)
    before = one.ledger
    newest = next(f.place.name.step for f in catalogue.find(LocalStorage(saved)) if f.is_complete)
    assert newest % 7 == 0 and before.lines[-1].step - 15 <= newest

    again = one.start(slots=2)
    one.hurry()
    assert again.process.wait(60) == 0
    again.await_line("goes on from the checkpoint of step", str(newest))
    after = one.ledger
    assert [r.resumed_at_step for r in after.resumptions] == [0, newest]
    assert {x.step for x in after.voided} == {x.step for x in before.lines if x.step > newest}
    one.check(finished=2)
    assert after.steps == LAST_STEP
    # The last state is there at the end
    assert catalogue.find(LocalStorage(saved))[0].place.name.step == LAST_STEP
    assert catalogue.find(LocalStorage(saved))[0].is_complete

    # the same training from early on, without an interruption: initial parameters are random
    reference = make(job, tmp_path / "early")
    reference.hurry()
    reference.start(slots=2)
    reference.finish(deadline_s=60)
    assert 0 < early < newest
    assert same_state(one.ends()[0], reference.ends()[0])


def test_all_workers_killed_and_the_agents_live(job: MakeJob, tmp_path: Path) -> None:
    """No worker holds the state: the same job begins again from its checkpoint, with new workers."""
    saved = tmp_path / "saved"
    one = make(job, saved)
    node = one.start(slots=2)
    copy_of_newest(saved, tmp_path / "early")
    one.await_step(LAST_STEP // 2 + 10)
    victims = node.workers
    for worker in victims:
        worker.kill()
    node.await_line("goes on from the checkpoint of step")
    assert {w.worker_id for w in node.workers}.isdisjoint({w.worker_id for w in victims})
    one.finish(deadline_s=60)
    one.check(finished=2)
    after = one.ledger
    assert after.resumptions[0].resumed_at_step == 0
    assert len(after.resumptions) == 2 and after.steps == LAST_STEP


ENDS_APART = """
import torch, bagua_core as bagua

bagua.init_process_group()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
while bagua.next_step() < 21:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
if bagua.get_rank() == 0:
    CHANGE
"""


@pytest.mark.parametrize(
    ("change", "what"), [("net.weight.data.mul_(0.5)", "values"), ("net.half()", "types")]
)
def test_what_one_worker_alone_changes_at_the_end_is_in_no_checkpoint(
    job: MakeJob, tmp_path: Path, change: str, what: str
) -> None:
    """As a script does that puts averaged weights into its model on rank 0, to save them."""
    saved, script = tmp_path / "saved", tmp_path / "script.py"
    script.write_text(ENDS_APART.replace("CHANGE", change))
    options = ["--checkpoint-dir", str(saved), "--checkpoint-every", "20"]
    one = job(options=options, file=script)
    node = one.start(slots=2)
    one.finish(deadline_s=START_S)
    assert node.says("the job's last checkpoint, of step 21, is not written", what, "ranks [0] and [1]"), (
        node.log
    )
    assert newest_step(saved) == 20
    one.check_nothing_left()
