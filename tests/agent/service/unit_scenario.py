"""Exercises a runner of units and prints the results as JSON. test_units.py runs it here, and under a real systemd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.service.units.child_units import ChildUnits
from bagua_agent.service.units.systemd_units import SystemdUnits, name_of
from bagua_agent.service.units.units import FoundUnit, UnitFolders, UnitNote, UnitRequest, UnitRunner

DEADLINE_S = 60.0

SCRIPT = """
import os, subprocess, sys, time
if sys.argv[1] == "fail":
    raise ValueError("on purpose")
escaped = subprocess.Popen(["setsid", "sleep", "1000"], env={})
open(sys.argv[2], "w").write(f"{os.getpid()} {escaped.pid} {os.environ['SAID']} {os.getcwd()}")
if sys.argv[1] == "wait":
    time.sleep(1000)
import bagua_core as bagua
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(100_000, 2))
for (rows,) in bagua.ElasticDataLoader(data, global_batch_size=4):
    optimizer.zero_grad()
    ddp(rows).mean().backward()
    optimizer.step()
    time.sleep(0.02)
"""


def wait(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {DEADLINE_S} s: {what}")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main(kind: str, place: Path) -> dict[str, object]:
    script = place / "script.py"
    script.write_text(SCRIPT)
    parent = place / "units"
    folders = UnitFolders(parent)
    environment = {"PATH": os.environ["PATH"], "SAID": "a secret", "HOME": os.path.expanduser("~")}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]

    def runner() -> UnitRunner:
        """As a daemon that was started again has it."""
        return SystemdUnits("8G") if kind == "systemd" else ChildUnits(parent)

    def request(job_id: str, *words: str, directory: str = str(place)) -> Path:
        command = WorkerCommand(CommandKind.SCRIPT, str(script), words)
        # importing torch takes seconds of processor time, in the warm parent already
        start_method = "warm" if words[0] == "train" else "spawn"
        config = JobConfig(
            job_id,
            command,
            log_dir=str(place / "logs"),
            redirects="3",
            max_restarts=0,
            start_method=start_method,
        )
        return folders.make(
            UnitRequest(config, environment, directory), UnitNote(7, (0,), 2, 30.0, "n1", 1e9)
        )

    def unit(job_id: str) -> FoundUnit | None:
        return next((u for u in runner().found() if u.job_id == job_id), None)

    def ended(job_id: str) -> int:
        wait(f"{job_id} ends", lambda: (u := unit(job_id)) is not None and not u.is_alive)
        found = unit(job_id)
        assert found is not None and found.exit_code is not None
        return found.exit_code

    def start_and_look(job_id: str, work: str) -> tuple[int, int]:
        runner().start(job_id, request(job_id, work, str(place / job_id)))
        wait(
            f"{job_id} runs",
            lambda: (place / job_id).exists() and (place / job_id).read_text().count(" ") >= 3,
        )
        worker, escaped, *_ = (place / job_id).read_text().split(" ")
        return int(worker), int(escaped)

    told: dict[str, object] = {"none": runner().found()}
    worker, escaped = start_and_look("leaves", "train")
    told["environment"] = (place / "leaves").read_text().split(" ", 2)[2]
    other, left = start_and_look("killed", "wait")
    if kind == "systemd":
        shown = ["systemctl", "show", "--property=MemoryMax", "--value", name_of("killed")]
        told["memory"] = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()
    told["note"] = asdict(folders.note("killed"))
    told["found"] = sorted((u.job_id, u.is_alive, is_running(u.pid)) for u in runner().found())
    told["command lines"] = [
        "a secret" in Path(f"/proc/{u.pid}/cmdline").read_text() for u in runner().found()
    ]
    told["folder"] = oct((parent / "leaves").stat().st_mode & 0o777)
    runner().ask_to_leave("leaves")
    told["left with"] = ended("leaves")
    runner().forget("leaves")
    wait("the worker is gone", lambda: not is_running(worker))
    told["escaped after leaving"] = is_running(escaped)
    # other threads of an ended process, which has a state of its own, may hold the unit's lock for a moment
    wait("only one is found", lambda: [u.job_id for u in runner().found()] == ["killed"])
    runner().kill("killed")
    told["killed with"] = ended("killed")
    runner().forget("killed")
    wait("the worker is gone", lambda: not is_running(other))
    told["escaped after killing"] = is_running(left)
    runner().start("fails", request("fails", "fail"))
    told["failed with"] = ended("fails")
    # Again, over its remains
    runner().start("fails", request("fails", "fail", directory=str(place / "no-such")))
    told["without a directory"] = ended("fails")
    runner().forget("fails")
    told["at the end"] = [u.job_id for u in runner().found()]
    for pid in (escaped, left):  # where nothing held them
        if is_running(pid):
            os.kill(pid, 9)
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
