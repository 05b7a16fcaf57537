"""A script that sets library variables before its import of torch has them count, as under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.conftest import Launch

SETS = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n"
SHOWS = "import os, torch\nprint(os.environ['LOCAL_RANK'], torch.get_num_threads())\n"
LIVE = """
import torch, bagua_core as bagua
bagua.init_process_group()
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
while bagua.next_step() < 3:
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""
AGAIN = "it starts again in a fresh interpreter"


@pytest.mark.parametrize("start_method", ["warm", pytest.param("spawn", marks=pytest.mark.long)])
def test_set_by_the_script(launch: Launch, start_method: str) -> None:
    done = launch("--nproc-per-node", "2", script=SETS + SHOWS, start_method=start_method)
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"], done.stderr
    assert AGAIN not in done.stderr, "its text shows it"


@pytest.mark.parametrize(
    "between", [pytest.param("", id="torch's", marks=pytest.mark.long), pytest.param(LIVE, id="live")]
)
def test_set_by_a_module_of_the_script(launch: Launch, tmp_path: Path, between: str) -> None:
    (tmp_path / "helper.py").write_text(SETS)
    done = launch("--nproc-per-node", "2", script="import helper\n" + between + SHOWS, start_method="warm")
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"], done.stderr
    assert done.stderr.count(AGAIN) == 2


def test_set_for_the_launcher(launch: Launch) -> None:
    done = launch(script=SHOWS, env={"OMP_NUM_THREADS": "1"}, start_method="warm")
    assert done.stdout == "0 1\n" and AGAIN not in done.stderr


def test_nothing_is_loaded_before_a_spawned_script(launch: Launch) -> None:
    names = "('torch', 'numpy', 'grpc', 'bagua_core', 'google')"
    done = launch(script=f"import sys\nprint([n for n in {names} if n in sys.modules])\n")
    assert done.stdout == "[]\n"
