"""bagua-launch --enable-bagua-net: workers have the variable by which NCCL loads the plugin, and its counters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.printed import printed
from tests.lab.wait import HANG_S

SCRIPT = """
import ctypes, os
from bagua_contract import net_counters as counters
plugin = ctypes.CDLL(os.environ["NCCL_NET_PLUGIN"])
print("plugin", ctypes.c_char_p.in_dll(plugin, "ncclNetPlugin_v12").value.decode())
print("kept", os.environ["NCCL_NET_PLUGIN_REF_COUNT"])
print("bytes_sent", counters.read(os.getpid())["bytes_sent"])
"""


def launched(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    *options, script_given = printed("docs/bagua-net.md", "--enable-bagua-net", {"train.py": str(script)})
    return subprocess.run(
        [sys.executable, "-m", "bagua_launch", *options, "--nproc-per-node", "2", script_given],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_workers_can_load_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launched(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plugin Bagua") == 2
    assert done.stdout.count("bytes_sent 0") == 2
    assert done.stdout.count("kept 1") == 2


def test_without_a_compiler_nothing_is_started(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    done = launched(script, CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no C++ compiler (no-such-compiler) on PATH" in done.stderr
