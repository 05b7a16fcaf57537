"""A worker under another account that tampers with its logs harms neither the node's disk nor the logs' readers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.service.logs.job_logs import JobLogs
from bagua_agent.workers.output.log_layout import LogLayout
from bagua_agent.workers.output.log_parts import part_ends
from bagua_agent.workers.output.output_options import OutputOptions
from bagua_agent.workers.output.router import OutputRouter
from bagua_agent.workers.process.account import find_account
from bagua_agent.workers.process.worker_process import WorkerProcess

DEADLINE_S = 60.0
ACCOUNT = "nobody"

HARM = """
cd "$(dirname "$BAGUA_ERROR_FILE")" || exit 9
for harm in 'touch new' 'mv stdout.log other' 'rm -f stdout.log' 'ln -s /etc/shadow stdout.log.5' \
    'mkfifo stdout.log.6' 'mkdir stdout.log.7'; do
  $harm 2>/dev/null && echo "HARM: $harm" >&2
done
i=0
while [ $i -lt 40 ]; do
  # While it is rotated, the file is absent for a moment (-c), then not yet this account's.
  truncate -c -s 1T stdout.log 2>/dev/null
  head -c 100000 /dev/zero | tr '\\0' 'x'; echo
  truncate -c -s 0 stdout.log 2>/dev/null
  i=$((i+1))
done
echo last
"""

LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("holds", flush=True)
signal.pause()
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run workers under another account")


@pytest.fixture
def place() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def run(place: Path, program: str) -> Path:
    """The directory of its worker's logs. A bound of 1 MiB. Not as a job's worker: the account may not reach our
    interpreter."""
    account = find_account(ACCOUNT)
    assert account is not None
    layout = LogLayout(place / "logs", "job", "node", account)
    router = OutputRouter(OutputOptions.parse(redirects="3"), layout, several=False, max_log_bytes=1 << 20)
    router.start()
    error_file = layout.make_worker_directory(0, "w").error
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    for end in (out, err):
        os.set_blocking(end, False)
    worker = SimpleNamespace(worker_id="w", slot=0, stdout_fd=out, stderr_fd=err)
    router.attach(cast(WorkerProcess, worker))
    try:
        subprocess.run(
            ["sh", "-c", program],
            env={"PATH": os.environ["PATH"], "BAGUA_ERROR_FILE": str(error_file)},
            stdin=subprocess.DEVNULL, stdout=out_end, stderr=err_end, cwd="/", timeout=DEADLINE_S, check=True,
            **account.process_arguments,
        )  # fmt: skip
    finally:
        for end in (out_end, err_end):
            os.close(end)
        router.finish("w", DEADLINE_S)
        router.stop()
    return error_file.parent


def test_its_logs_stay_bounded_and_can_be_read(place: Path) -> None:
    directory = run(place, HARM)
    assert (directory / "stderr.log").read_text() == "", "it did what it must not be able to"
    assert {p.name for p in directory.iterdir()} <= {
        *("stdout.log", "stderr.log", "error.json"),
        *(f"stdout.log.{end}" for end in part_ends(directory / "stdout.log")),
    }
    assert len(part_ends(directory / "stdout.log")) <= 1
    used = sum(p.stat().st_blocks * 512 for p in directory.iterdir())
    assert used <= 2 << 20
    logs = JobLogs(place / "logs", "node")
    (listed,) = logs.list("job")
    read = b"".join(
        piece.data
        for piece in logs.read(
            "job", directory.name, stderr=False, last_bytes=1000, goes_on=lambda wait_s: False
        )
    )
    assert read.endswith(b"last\n")
    # how much it removed itself depends on how fast the agent wrote meanwhile
    assert listed.stdout_bytes >= len(read)


def test_a_lease_on_a_log_holds_no_reader(place: Path) -> None:
    directory = run(place, "head -c 2000000 /dev/zero | tr '\\0' 'y'; echo; echo last")
    log = directory / "stdout.log"
    holder = subprocess.Popen(
        [sys.executable, "-c", LEASE, str(log)], stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        began_s = time.monotonic()
        with pytest.raises(UserError, match=r"stdout\.log"):
            list(
                JobLogs(place / "logs", "node").read(
                    "job", directory.name, stderr=False, last_bytes=10, goes_on=lambda wait_s: False
                )
            )
        assert time.monotonic() - began_s < 5.0, "a lease that is broken ends after 45 s"
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
        if holder.stdout is not None:
            holder.stdout.close()
