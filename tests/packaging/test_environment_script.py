"""scripts/environment.sh and scripts/quickstart with a Python whose pip only writes down what it was asked for."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.page_blocks import commands
from tests.docs.printed import printed_block

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 60
# Stands for the interpreter of the machine and, once "-m venv" has copied it, of the environment.
PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv .venv")
    mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/bagua-launch
    exit "${VENV_FAILS:-0}" ;;
  *"-m pip install"*)
    printf '%s | index %s\\n' "$*" "$PIP_INDEX_URL" >>asked
    case "$*" in *" torch") echo "Downloading torch.whl (200 MB)"; exit "${TORCH_FAILS:-0}" ;; esac ;;
  *importlib.metadata*) exit 1 ;;
  *char_lm.py*) echo "the job: $*" ;;
esac
"""


class Checkout:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in (
            "pyproject.toml",
            "setup.py",
            "tests/constraints.txt",
            "scripts/environment.sh",
            "scripts/quickstart",
        ):
            (directory / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(ROOT / name, directory / name)
        self.python = self.interpreter("python3.14")

    def interpreter(self, name: str) -> Path:
        path = self.directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PYTHON)
        path.chmod(0o755)
        return path

    def run(
        self, *words: str, stdout: int = subprocess.PIPE, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "BAGUA_PYTHON": str(self.python), **variables}
        return subprocess.run(
            words, cwd=self.directory, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True,
            timeout=RUN_S, check=False,
        )  # fmt: skip

    @property
    def asked(self) -> list[str]:
        """What pip was asked for, torch first."""
        return (self.directory / "asked").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_quickstart_says_what_it_downloads_and_runs_the_job(checkout: Checkout) -> None:
    ((program,),) = commands(printed_block("README.md", "scripts/quickstart"))
    done = checkout.run(program, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[:2] == [
        "== environment (.venv)",
        "installing torch into .venv: 200 MB for a build without CUDA, 3 GB with it "
        "(BAGUA_TORCH_INDEX names another index)",
    ]
    assert said[2] == "Downloading torch.whl (200 MB)", "pip's own lines are shown while torch is downloaded"
    command = ".venv/bin/bagua-launch --nproc-per-node 2 examples/char_lm.py --lr 0.1"
    assert said[-2] == f"== an elastic job of two workers: {command}"
    assert checkout.run("bash", "-c", command).returncode == 0, "as printed"
    assert said[-1] == "the job: --nproc-per-node 2 examples/char_lm.py --lr 0.1"


def test_torch_comes_from_where_pips_own_settings_say(checkout: Checkout) -> None:
    checkout.run("scripts/quickstart", PIP_INDEX_URL="https://own.example/simple")
    assert len(checkout.asked) == 3 and all(
        line.endswith("| index https://own.example/simple") and "--index-url" not in line
        for line in checkout.asked
    )


def test_another_index_is_for_torch_alone(checkout: Checkout) -> None:
    checkout.run("scripts/quickstart", BAGUA_TORCH_INDEX="https://torch.example/cpu")
    assert ["--index-url https://torch.example/cpu torch" in line for line in checkout.asked] == [
        True,
        False,
        False,
    ]


def test_a_bar_of_progress_is_for_a_terminal(checkout: Checkout) -> None:
    checkout.run("scripts/quickstart")
    assert "--progress-bar off" in checkout.asked[0]
    shutil.rmtree(checkout.directory / ".venv")
    ours, theirs = pty.openpty()
    try:
        checkout.run("scripts/quickstart", stdout=theirs)
    finally:
        os.close(theirs)
        os.close(ours)
    assert "--progress-bar on" in checkout.asked[3] and checkout.asked[3].split(" | ")[0].endswith(" torch")


def test_what_was_installed_is_not_installed_again(checkout: Checkout) -> None:
    checkout.run("scripts/quickstart")
    assert checkout.run("scripts/quickstart").returncode == 0 and len(checkout.asked) == 3


@pytest.mark.parametrize("shell", ["set -e; ", ""])
def test_a_failed_download_is_an_error_and_tried_again(checkout: Checkout, shell: str) -> None:
    line = shell + ". scripts/environment.sh; bagua_environment ''"
    assert checkout.run("bash", "-c", line, TORCH_FAILS="1").returncode == 1
    assert len(checkout.asked) == 1, "nothing else is installed without torch"
    assert checkout.run("bash", "-c", line).returncode == 0 and len(checkout.asked) == 4


@pytest.mark.parametrize(
    ("trouble", "calls"),
    [("E: Unable to lock directory /var/lib/apt/lists/", 2), ("E: Unable to locate package none", 1)],
)
def test_the_lock_of_another_apt_is_waited_for(checkout: Checkout, trouble: str, calls: int) -> None:
    apt = checkout.python.with_name("apt-get")
    apt.write_text(
        f'#!/bin/sh\necho call >>calls\n[ "$(wc -l <calls)" -gt 1 ] || {{ echo "{trouble}" >&2; exit 100; }}\n'
    )
    apt.chmod(0o755)
    path = f"{apt.parent}:{os.environ['PATH']}"
    done = checkout.run("bash", "-ec", ". scripts/environment.sh; bagua_apt update", PATH=path)
    assert (done.returncode, done.stderr) == ((0, "") if calls == 2 else (1, f"{trouble}\n"))
    assert (checkout.directory / "calls").read_text() == "call\n" * calls


def test_an_environment_that_was_not_completed_is_made_again(checkout: Checkout) -> None:
    line = ". scripts/environment.sh; bagua_environment ''"
    assert checkout.run("bash", "-c", line, VENV_FAILS="1").returncode == 1
    assert not (checkout.directory / ".venv").exists()
    assert checkout.run("bash", "-c", line).returncode == 0 and len(checkout.asked) == 3


@pytest.mark.parametrize("name", ["python3.11", "python3.12", "python3.13", "python3.14", "python3"])
def test_interpreters_that_are_looked_for(checkout: Checkout, name: str) -> None:
    checkout.python.unlink()
    found = checkout.interpreter(name)
    done = checkout.run(
        "/bin/bash", "-c", ". scripts/environment.sh; bagua_python", PATH=str(found.parent), BAGUA_PYTHON=""
    )
    assert done.stdout == f"{found}\n", done.stderr


def test_no_interpreter_is_one_line(checkout: Checkout) -> None:
    done = checkout.run(
        "bash", "-c", ". scripts/environment.sh; bagua_environment ''", BAGUA_PYTHON="python-none"
    )
    assert done.returncode == 1
    assert done.stderr == "bagua needs Python 3.11 or later on PATH (or in BAGUA_PYTHON)\n"
