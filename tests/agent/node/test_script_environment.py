"""Detection, from its text, of a script that sets library variables before it imports torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.node.script.script_environment import set_before_torch, why_a_fresh_interpreter

IMPORTS = "\nimport torch\n"


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'" + IMPORTS, "OMP_NUM_THREADS"),
        ("import os as o\no.environ.setdefault('MKL_NUM_THREADS', '3')" + IMPORTS, "MKL_NUM_THREADS"),
        ("from os import environ as e\ne['TORCH_LOGS'] = '+dynamo'" + IMPORTS, "TORCH_LOGS"),
        ("import os\nos.environ.update({'A': '1', 'PYTORCH_JIT': '0'})" + IMPORTS, "PYTORCH_JIT"),
        ("import os\nos.environ.update(OMP_NUM_THREADS='1')" + IMPORTS, "OMP_NUM_THREADS"),
        ("import os\nos.environ |= settings" + IMPORTS, "a variable"),
        ("import os\nfor k, v in x: os.environ[k] = v" + IMPORTS, "a variable"),
        ("import os\ndel os.environ['OMP_NUM_THREADS']" + IMPORTS, "OMP_NUM_THREADS"),
        ("import os\nos.putenv('NCCL_DEBUG', 'INFO')" + IMPORTS, "NCCL_DEBUG"),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nfrom torch import nn", "OMP_NUM_THREADS"),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport bagua_core", "OMP_NUM_THREADS"),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport helper", "OMP_NUM_THREADS"),
        ("import os\ndef f():\n import torch\nos.environ['OMP_NUM_THREADS'] = '3'", "OMP_NUM_THREADS"),
        ("import torch, os\nos.environ['OMP_NUM_THREADS'] = '3'", ""),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'" + IMPORTS, ""),
        ("import os\nos.environ['MY_DATA'] = '/d'" + IMPORTS, ""),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'])" + IMPORTS, ""),
    ],
)
def test_what_the_text_sets_first(text: str, variable: str) -> None:
    assert set_before_torch(text.encode()) == variable


def test_what_cannot_be_read_or_parsed_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("os.environ[")
    for kind, name in ((CommandKind.SCRIPT, "broken.py"), (CommandKind.EXECUTABLE, "ls")):
        assert why_a_fresh_interpreter(WorkerCommand(kind, name), tmp_path) is None


def test_the_reason_names_file_and_variable(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'" + IMPORTS)
    reason = why_a_fresh_interpreter(WorkerCommand(CommandKind.SCRIPT, "train.py"), tmp_path)
    assert reason == "train.py sets OMP_NUM_THREADS before it imports torch"
