"""`nohup bagua-launch ... &`: the job goes on after the end of the terminal, as any other program under nohup."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.lab.wait import HANG_S, eventually
from tests.peers.conftest import launch_environment

WAITS = """
import os, pathlib, time
pathlib.Path("waits.new").write_text(str(os.getpid()))
os.rename("waits.new", "waits")
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def ignores_hangups(pid: int) -> bool:
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")
    ]
    return bool(int(line.split()[1], 16) & 1 << (signal.SIGHUP - 1))


def test_a_hangup_that_is_ignored_at_the_start_stays_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    line = ["nohup", sys.executable, "-m", "bagua_launch", "--start-method", "spawn", "script.py"]
    with (
        (tmp_path / "said").open("wb") as said,
        subprocess.Popen(
            line,
            cwd=tmp_path,
            env=launch_environment(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        ) as process,
    ):
        try:
            eventually((tmp_path / "waits").exists, 60, lambda: (tmp_path / "said").read_text())
            assert ignores_hangups(process.pid)
            assert ignores_hangups(int((tmp_path / "waits").read_text())), "the worker inherits it"
            process.send_signal(signal.SIGHUP)
            (tmp_path / "go").touch()
            assert process.wait(HANG_S) == 0, (tmp_path / "said").read_text()
        finally:
            process.kill()
