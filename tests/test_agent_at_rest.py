"""An agent loads what its job needs and nothing else: it stays in memory for as long as the job runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[1]

RUN_JOB = """
import sys
from bagua_launch.main import main
sys.argv[1:] = ["--standalone", "--no-python", "true"]
try:
    main()
except SystemExit as ended:
    print(ended.code, *sys.modules)
"""
NOT_FOR_EVERY_JOB = {
    "cryptography",  # 11 MiB, for a job's key pair: a program of its own makes it
    "bagua_agent.autotune.tuner",  # half a MiB with what it loads, for jobs that are tuned
    "statistics",  # with decimals and fractions, for stalls
    "difflib",  # for mistyped options
    "http.server",  # for metrics, the page and health checks
    "prometheus_client",
    "opentelemetry",
}


def test_an_agent_has_not_loaded_what_its_job_does_not_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_JOB], capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, check=False
    )
    code, *loaded = done.stdout.split()
    assert code == "0", done.stderr
    assert {"grpc", "etcd3", "bagua_agent.job.loop"} <= set(loaded), "the job was not run by this process"
    assert not NOT_FOR_EVERY_JOB & set(loaded)
