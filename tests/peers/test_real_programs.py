"""Programs written for torchrun, unchanged: one of two workers is killed, and the result is torchrun's.

programs/ holds them. Each saves checkpoints and goes on from them by its own means.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.lab.wait import patiently
from tests.peers.conftest import launch_environment

PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_S = 240


def workers_of(launcher: int) -> list[int]:
    """The processes of the program under test, whichever helper of the launcher started them."""
    parents: dict[int, tuple[int, bytes]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents[int(entry.name)] = parent, (entry / "cmdline").read_bytes()
    found = [launcher]
    for pid in found:
        found += [child for child, (parent, _) in parents.items() if parent == pid]
    return [pid for pid in found[1:] if os.fsencode(PROGRAMS) in parents[pid][1]]


def run(directory: Path, launcher: str, program: str, *options: str) -> tuple[Path, str]:
    """The program's directory, and what was said on stderr."""
    out = directory / launcher.replace(".", "-")
    out.mkdir(exist_ok=True)
    words = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", "2", *options]
    with subprocess.Popen(
        [*words, str(PROGRAMS / f"{program}.py"), str(out)],
        cwd=directory,
        env=launch_environment(directory, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            shown, said = patiently(lambda seconds: started.communicate(timeout=seconds), TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for worker in workers_of(started.pid):
                os.kill(worker, signal.SIGABRT)  # it writes the stacks of its threads: see PYTHONFAULTHANDLER
            started.terminate()  # not killed: it ends its workers, which have sessions of their own
            shown, said = started.communicate(timeout=TIMEOUT_S)
            pytest.fail(f"{launcher} was not done after {TIMEOUT_S} s\n{shown}\n{said}")
    assert started.returncode == 0, shown + said
    return out, said


def check(tmp_path: Path, program: str, ends_at: int) -> None:
    undisturbed, _ = run(tmp_path, "torch.distributed.run", program)
    (tmp_path / "bagua_launch").mkdir()
    (tmp_path / "bagua_launch" / "end-at").write_text(str(ends_at))
    disturbed, said = run(tmp_path, "bagua_launch", program)
    assert (disturbed / "has-ended").exists(), "no worker was killed"
    assert "killed by SIGKILL" in said and "generation 2" in said, said
    expected, found = (torch.load(out / "result.pt") for out in (undisturbed, disturbed))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    ("program", "ends_at"),
    [
        pytest.param("ddp_snapshots", 2, marks=pytest.mark.long),
        pytest.param("fsdp_dcp", 6, marks=pytest.mark.long),
        ("small_gpt", 8),
    ],
)
def test_with_torch_alone(tmp_path: Path, program: str, ends_at: int) -> None:
    check(tmp_path, program, ends_at)


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "program", "ends_at"),
    [
        ("transformers", "hf_trainer", 5),
        ("accelerate", "accelerate_loop", 2),
        ("lightning", "lightning_ddp", 2),
    ],
)
def test_with_a_framework(tmp_path: Path, framework: str, program: str, ends_at: int) -> None:
    found = importlib.util.find_spec(framework) is not None
    assert found, f"{framework} is not installed: pip install -e '.[frameworks]', as scripts/test --long does"
    check(tmp_path, program, ends_at)
