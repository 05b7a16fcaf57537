"""Scripts of both kinds, in the ways people write them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.node.script.script_mode import (
    Mode,
    guess_mode,
    makes_torch_group,
    opens_a_session,
    options_of_steps,
)
from bagua_agent.node.script.script_text import LARGEST_SCRIPT_BYTES


@pytest.mark.parametrize(
    "source",
    [
        "import bagua_core as bagua\nbagua.init_process_group()",
        "import bagua_core\ndef main():\n    bagua_core.init_process_group()",
        "from bagua_core import init_process_group as start\nstart()",
        "from bagua_core import *\ninit_process_group()",
        "import bagua_core.torch_api as bagua\nbagua.init_process_group()",
        "import bagua_core.torch_api\nbagua_core.torch_api.init_process_group()",
        "from bagua_core import torch_api\nif x:\n    torch_api.init_process_group()",
    ],
)
def test_a_script_that_opens_a_session(source: str) -> None:
    assert opens_a_session(source.encode())


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "import bagua_core\nimport torch.distributed as dist\nbagua_core.fuse_optimizer(o)\ndist.init_process_group()",
        "# bagua_core.init_process_group() would be next\nprint(1)",
        "print('bagua_core.init_process_group')",
        "import bagua_core_of_others as bagua\nbagua.init_process_group()",
        "",
    ],
)
def test_a_script_that_does_not(source: str) -> None:
    assert not opens_a_session(source.encode())


@pytest.mark.parametrize(
    ("source", "makes"),
    [
        ("import torch.distributed as dist\ndist.init_process_group('gloo')", True),
        ("import torch\ntorch.distributed.init_process_group()", True),
        ("import torch as t\nt.distributed.init_process_group()", True),
        ("from torch import distributed as dist\ndist.init_process_group()", True),
        ("from torch.distributed import init_process_group\ninit_process_group()", True),
        ("import bagua_core as bagua\nimport torch.distributed\nbagua.init_process_group()", False),
        ("from torch import nn, distributed\nfrom own.library import train\ntrain()", False),
        ("import torch\ntorch.distributed.init_process_group(\ndef (:\n", False),
    ],
)
def test_a_script_that_makes_torchs_group(tmp_path: Path, source: str, makes: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    assert makes_torch_group(WorkerCommand(CommandKind.SCRIPT, "train.py"), tmp_path, []) is makes


def test_a_script_that_is_costly_to_parse_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    costly = b"import bagua_core\nbagua_core.init_process_group()\n" + b"x\n" * (LARGEST_SCRIPT_BYTES // 2)
    (tmp_path / "costly.py").write_bytes(costly)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    guess = guess_mode(WorkerCommand(CommandKind.SCRIPT, "costly.py"), tmp_path, [])
    assert guess.mode is Mode.RESTART and "more than 131072" in guess.reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 50_000
    (said,) = [record.getMessage() for record in caplog.records]
    assert "'costly.py' can't be read" in said and "once one has called bagua_core" in said


def test_what_names_no_session_is_not_parsed_at_all() -> None:
    assert not opens_a_session(b"import bagua_core\ndef (:\n")


def test_what_is_looked_at(tmp_path: Path) -> None:
    live = "import bagua_core\nbagua_core.init_process_group()\n"
    (tmp_path / "live.py").write_text(live)
    (tmp_path / "plain.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("import bagua_core\nbagua_core.init_process_group(\ndef (:\n")
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04 bagua_core \x00\xff")
    (tmp_path / "large.py").write_text(live + "#" * LARGEST_SCRIPT_BYTES)
    package = tmp_path / "pkg" / "inner"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(live)
    (tmp_path / "pkg" / "leaf.py").write_text(live)

    def mode(kind: CommandKind, target: str) -> Mode:
        return guess_mode(WorkerCommand(kind, target), tmp_path, []).mode

    os.mkfifo(tmp_path / "fifo.py")
    assert mode(CommandKind.SCRIPT, "x" * 5000) is Mode.RESTART, "a name that no file has"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").symlink_to("/dev/zero")
    assert mode(CommandKind.SCRIPT, "live.py") is Mode.LIVE
    assert mode(CommandKind.RUN_PATH, str(tmp_path / "live.py")) is Mode.LIVE
    assert mode(CommandKind.SCRIPT, "pkg/inner") is Mode.LIVE
    assert mode(CommandKind.MODULE, "pkg.inner") is Mode.LIVE
    assert mode(CommandKind.MODULE, "pkg.leaf") is Mode.LIVE
    for kind, target in [
        (CommandKind.SCRIPT, "plain.py"),
        (CommandKind.SCRIPT, "broken.py"),
        (CommandKind.SCRIPT, "archive.zip"),
        (CommandKind.SCRIPT, "large.py"),
        (CommandKind.SCRIPT, "missing.py"),
        (CommandKind.SCRIPT, "fifo.py"),
        (CommandKind.SCRIPT, "/dev/zero"),
        (CommandKind.SCRIPT, "app"),
        (CommandKind.SCRIPT, "nu\0l.py"),
        (CommandKind.MODULE, "pkg.missing"),
        (CommandKind.EXECUTABLE, "live.py"),
    ]:
        assert mode(kind, target) is Mode.RESTART, target


def test_what_only_an_imported_module_can_change_is_known(tmp_path: Path) -> None:
    plain = "import torch.distributed as dist\ndist.init_process_group()\n"
    texts = {
        "plain.py": plain,
        "lightning.py": "from lightning_bagua import BaguaStrategy\n",
        "own.py": "import bagua_core\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    names = {n: guess_mode(WorkerCommand(CommandKind.SCRIPT, n), tmp_path, []).names_bagua for n in texts}
    assert names == {"plain.py": False, "lightning.py": True, "own.py": True}
    assert guess_mode(WorkerCommand(CommandKind.EXECUTABLE, "plain.py"), tmp_path, []).names_bagua


def test_options_that_concern_steps() -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "plain.py")
    assert options_of_steps(JobConfig("demo", command, max_restarts=3, log_dir="logs")) == []
    config = JobConfig("demo", command, ledger_dir="books", checkpoint_dir="/shared", hang_timeout_s=None)
    assert options_of_steps(config) == ["--checkpoint-dir", "--ledger", "--hang-timeout"]
