"""A job's variables reach its workers and never its agent, which may be root."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.service.units.run_unit import agent_environment
from bagua_agent.service.units.units import UnitFolders, UnitNote, UnitRequest, unit_command
from tests.lab.machine import ROOT
from tests.lab.wait import HANG_S

SCRIPT = """
import json, os, sys
json.dump(dict(os.environ), open(sys.argv[1], "w"))
"""
JOBS_OWN = {
    "SAID": "by the job",
    "TZ": "Asia/Tokyo",
    "TMPDIR": "/nowhere",
    "GRPC_TRACE": "all",
    "GRPC_VERBOSITY": "DEBUG",
    "BAGUA_AGENT_FAILPOINTS": "election.before=kill",
    "OMP_NUM_THREADS": "3",
    "CUDA_VISIBLE_DEVICES": "7",
}


def test_a_jobs_variables_reach_its_workers_alone(tmp_path: Path) -> None:
    script, said = tmp_path / "script.py", tmp_path / "environment.json"
    script.write_text(SCRIPT)
    places = f"{ROOT}:{ROOT / 'protos'}"
    command = WorkerCommand(CommandKind.SCRIPT, str(script), (str(said),))
    config = JobConfig("job", command, log_dir=str(tmp_path / "logs"), redirects="3", start_method="spawn")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{places}", **JOBS_OWN}
    folder = UnitFolders(tmp_path / "units").make(UnitRequest(config, environment, str(tmp_path)), UnitNote())
    inherited = {"PATH": os.environ["PATH"], "PYTHONPATH": places, "DAEMONS_OWN": "1"}
    unit = subprocess.run(
        unit_command(folder), env=inherited, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert unit.returncode == 0, unit.stderr
    worker = json.loads(said.read_text())
    assert {name: worker.get(name) for name in JOBS_OWN} == JOBS_OWN
    assert worker["PYTHONPATH"] == environment["PYTHONPATH"] and "DAEMONS_OWN" not in worker
    assert "failpoint" not in unit.stderr and len(unit.stderr) < 10_000, "gRPC traced the agent"


def test_what_the_agent_keeps_of_what_it_inherits() -> None:
    kept = agent_environment({"PATH": "/bin", "LC_TIME": "C", "LD_PRELOAD": "x", "BAGUA_X": "1", "HOME": "/"})
    assert kept == {"PATH": "/bin", "LANG": "C.UTF-8", "LC_TIME": "C"}
