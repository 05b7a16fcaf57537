"""Counts the node's GPUs through NVML, here through a fake library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.wait import HANG_S

ASK = "from bagua_agent.service.node.node_facts import gpus_by_nvml; print(gpus_by_nvml())"
SOURCE = """
int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return COUNT; }
const char *nvmlErrorString(int code) { return "as the test wants"; }
"""
NOT_FOUND, LOST = 9, 15  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_GPU_IS_LOST


@pytest.mark.parametrize(
    ("init", "count", "answer"), [(0, 0, "3"), (NOT_FOUND, 0, "None"), (0, LOST, "None")]
)
def test_as_many_as_nvml_lists(tmp_path: Path, init: int, count: int, answer: str) -> None:
    source = tmp_path / "nvml.c"
    source.write_text(SOURCE)
    library = tmp_path / "libnvidia-ml.so.1"
    defines = [f"-DINIT={init}", f"-DCOUNT={count}"]
    subprocess.run(["cc", "-shared", "-fPIC", *defines, "-o", library, source], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.strip() == answer, done.stderr
