"""A script's own environment counts for torch, although workers are forked from a process that has torch loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.stack_channel import StackChannel
from bagua_agent.workers.start.warm_parent import WarmParent
from tests.agent.workers.test_warm_parent import is_forked
from tests.agent.workers.worker_lab import EndedProcess, Workers, base_environment, wait_until

COMMAND = WorkerCommand(CommandKind.SCRIPT, "script.py", ("a",))
SETS = "import os, sys\nos.environ['OMP_NUM_THREADS'] = '2'\n"
SHOWS = "import torch\nprint(torch.get_num_threads())\n"


@pytest.fixture(scope="module")
def torch_parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WarmParent, Path]]:
    directory = tmp_path_factory.mktemp("fresh")
    (directory / "script.py").write_text("")
    env = {**base_environment(), "OMP_NUM_THREADS": "1"}
    made = WarmParent(COMMAND, env, directory=directory, preimport=("torch",))
    made.start()
    yield made, directory
    made.stop()


def run(workers: Workers, torch_parent: tuple[WarmParent, Path], source: str) -> tuple[int, EndedProcess]:
    parent, workers.directory = torch_parent
    workers.script(source)
    env = {"OMP_NUM_THREADS": "1"}
    worker = workers.start("script.py", *COMMAND.args, warm=parent, env=env, preimport=("torch",))
    assert is_forked(worker)
    worker.open_gate()
    return worker.pid, workers.to_end(worker)


@pytest.mark.parametrize(
    "then",
    [
        SHOWS,
        "import torch.nn\n" + SHOWS,
        "import numpy\n" + SHOWS,
        "assert 'torch' not in sys.modules\nimport importlib.util\nassert importlib.util.find_spec('torch')\n"
        "importlib.import_module('torch')\n" + SHOWS,
        "os.chdir('/')\nos.dup2(1, 2)\nfrom torch.nn import Linear\n" + SHOWS,
    ],
    ids=["plain", "submodule", "numpy first", "looked for first, import_module", "elsewhere, from"],
)
def test_what_the_script_sets_counts(
    workers: Workers, torch_parent: tuple[WarmParent, Path], then: str
) -> None:
    _, ended = run(workers, torch_parent, "print('start')\n" + SETS + then)
    assert (ended.returncode, ended.stdout) == (0, "start\nstart\n2\n"), ended.stderr
    assert ended.stderr.count("\n") == 1 and "set OMP_NUM_THREADS before" in ended.stderr


def test_the_process_stays_the_same_and_its_stacks_can_be_asked_for(
    workers: Workers, torch_parent: tuple[WarmParent, Path]
) -> None:
    show = "import json, torch\nprint(json.dumps([os.getpid(), os.getppid(), os.getcwd(), sys.argv]))\n"
    parent, workers.directory = torch_parent
    workers.script(SETS + show + "sys.stdout.flush()\nimport time\ntime.sleep(60)\n")
    worker = workers.start("script.py", "a", warm=parent, env={"OMP_NUM_THREADS": "1"}, preimport=("torch",))
    worker.open_gate()
    assert json.loads(workers.read_line(worker)) == [
        worker.pid,
        os.getpid(),
        str(workers.directory),
        ["script.py", "a"],
    ]
    channel = worker.stack_channel
    assert isinstance(channel, StackChannel)
    wait_until(
        lambda: (place := channel.place()) and channel.is_held_by(worker.pid, place), "channel is held"
    )
    before = channel.written_bytes()
    assert channel.ask()
    wait_until(lambda: "script.py" in channel.answer(before), "its stacks")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nimport os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch.nn\nprint('ran')\n",
        "import os\nos.environ['MY_OWN'] = '2'\nimport torch\nprint('ran')\n",
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport torch\nprint('ran')\n",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint('ran')\n",
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nprint('ran')\n",
    ],
    ids=["later", "another", "read late", "the same", "without torch"],
)
def test_what_does_not_matter_starts_nothing_again(
    workers: Workers, torch_parent: tuple[WarmParent, Path], source: str
) -> None:
    _, ended = run(workers, torch_parent, source)
    assert ended == EndedProcess(0, "ran\n", "")


@pytest.mark.parametrize("set_by", ["os.environ['CUDA_VISIBLE_DEVICES'] = '5,3'", "os.putenv(*ASSIGNED)"])
def test_the_devices_that_the_script_names_count_in_a_fork(
    workers: Workers, torch_parent: tuple[WarmParent, Path], set_by: str
) -> None:
    """torch reads the variable in Python, the driver by getenv; both at a GPU's first use, after the fork."""
    source = f"""
import os
ASSIGNED = "CUDA_VISIBLE_DEVICES", "5,3"
{set_by}
import ctypes, torch
from torch import cuda
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"CUDA_VISIBLE_DEVICES").decode(), cuda.is_initialized(), cuda._cached_device_count)
if "CUDA_VISIBLE_DEVICES" in os.environ:
    print(cuda._parse_visible_devices())
"""
    _, ended = run(workers, torch_parent, source)
    torchs = "" if "putenv" in set_by else "[5, 3]\n"
    assert ended == EndedProcess(0, f"5,3 False None\n{torchs}", "")


def test_a_child_of_the_script_is_not_started_again(
    workers: Workers, torch_parent: tuple[WarmParent, Path]
) -> None:
    source = (
        SETS
        + "if os.fork() == 0:\n    import torch\n    print('child', flush=True)\n    os._exit(0)\nos.wait()\n"
    )
    _, ended = run(workers, torch_parent, source + SHOWS)
    assert ended.stdout == "child\nchild\n2\n"


def test_what_was_imported_ahead_is_as_after_an_import(
    workers: Workers, torch_parent: tuple[WarmParent, Path]
) -> None:
    source = """
import sys
assert not [n for n in sys.modules if n.startswith(("torch", "numpy"))]
try:
    import no_such_module
except ModuleNotFoundError as error:
    assert error.__traceback__.tb_next is None
import numpy
assert numpy.__spec__ is sys.modules["numpy"].__spec__ and not any("torch" in n for n in sys.modules)
import torch, importlib
assert type(torch.__spec__.loader).__name__ == "SourceFileLoader", torch.__spec__
assert torch.nn.functional is importlib.import_module("torch.nn.functional")
assert len([f for f in sys.meta_path if type(f).__module__.startswith("_bagua")]) == 0
print(torch.ones(2).numpy().sum())
"""
    _, ended = run(workers, torch_parent, source)
    assert ended == EndedProcess(0, "2.0\n", "")


def test_a_spawned_worker_has_nothing_loaded(workers: Workers) -> None:
    show = "import sys\nprint([n for n in ('torch', 'numpy', 'grpc', 'bagua_core') if n in sys.modules])\n"
    workers.script(show)
    ended = workers.to_end(workers.start("script.py", preimport=("torch", "bagua_core", "grpc")))
    assert ended == EndedProcess(0, "[]\n", "")
