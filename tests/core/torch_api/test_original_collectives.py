"""The collectives in the original's form: in a job of three, and alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.launched import launch
from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[3]
RANK = Path(__file__).with_name("collectives_rank.py")


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_"))}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_three_workers_get_what_each_collective_promises(tmp_path: Path) -> None:
    ended = launch("--standalone", "--nproc-per-node", "3", str(RANK), str(tmp_path))
    assert ended.returncode == 0, ended.said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


ALONE = """
import torch, bagua_core.torch_api as bagua
bagua.init_process_group()
x, y = torch.arange(4.0), torch.zeros(4)
for act in (
    lambda: bagua.allreduce(x, y), lambda: bagua.allgather(x, y), lambda: bagua.alltoall(x, y),
    lambda: bagua.reduce(x, y, 0), lambda: bagua.gather(x, y, 0), lambda: bagua.scatter(x, y, 0),
    lambda: bagua.reduce_scatter(x, y), lambda: bagua.alltoall_v(x, [4], [0], y, [4], [0]),
):
    y.zero_(); act(); assert torch.equal(x, y)
for act in (
    bagua.allreduce_inplace, bagua.allgather_inplace, bagua.alltoall_inplace, bagua.reduce_scatter_inplace,
    bagua.broadcast, lambda t: bagua.gather_inplace(t, 4, 0), lambda t: bagua.scatter_inplace(t, 4, 0),
    lambda t: bagua.alltoall_v_inplace(t, [4], [0]), lambda t: bagua.reduce_inplace(t, 0),
):
    y.copy_(x); act(y); assert torch.equal(x, y)
assert bagua.broadcast_object([1]) == [1]
bagua.barrier()
print(bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size())
"""


def test_alone_every_collective_is_the_identity() -> None:
    ended = run("-c", ALONE)
    assert (ended.returncode, ended.stdout) == (0, "0 1 0 1\n"), ended.stderr


def test_an_elastic_script_that_marks_no_steps_is_told_so() -> None:
    code = """
import torch, bagua_core.torch_api as bagua
bagua.init_process_group(elastic=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], "gradient_allreduce")
model(torch.ones(1, 2)).sum().backward()
"""
    ended = launch("--standalone", "--no-python", sys.executable, "-c", code)
    assert ended.returncode == 1
    assert "OutsideStepError: gradients were computed outside a step" in ended.said


def test_an_optimizer_step_before_the_first_forward_of_an_announced_step_is_one_clear_error() -> None:
    code = """
import torch, bagua_core as bagua
bagua.init_process_group()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(model, optimizers=[optimizer])
optimizer.step()  # no gradient yet: many scripts quiet a scheduler's warning so
bagua.next_step()
optimizer.step()
print("nothing moved", flush=True)
model.module.weight.grad = torch.ones(2, 2)
optimizer.step()
"""
    ended = launch("--standalone", "--no-python", sys.executable, "-c", code)
    assert ended.returncode == 1 and "nothing moved" in ended.said
    assert "begins with a model's first forward in training, and there was none yet" in ended.said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("store=object()", "store: workers meet through bagua-launch"),
        ("rank=3", "rank=3, but in this job it is 0"),
        ("world_size=8", "world_size=8, but in this job it is 1"),
        ("local_world_size=2", "local_world_size=2, but in this job it is 1"),
    ],
)
def test_what_the_job_decides_differently_is_said(arguments: str, words: str) -> None:
    ended = run("-c", f"import bagua_core.torch_api as bagua; bagua.init_process_group({arguments})")
    assert ended.returncode == 1 and f"ValueError: {words}" in ended.stderr


def test_processes_of_another_launcher_do_not_train_alone_in_silence() -> None:
    code = "import bagua_core.torch_api as bagua; bagua.init_process_group()"
    ended = run("-c", code, WORLD_SIZE="2", RANK="0")
    assert ended.returncode == 1 and "NotLaunchedError: WORLD_SIZE=2" in ended.stderr
