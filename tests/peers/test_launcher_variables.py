"""Variables that torchrun's launcher reads, or gives its workers, beside those of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.base.messages import HealthAsked
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand, launcher_variables
from bagua_agent.node.torchrun.file_timers import FileTimers, Timer, parse_request, timer_file
from bagua_agent.node.torchrun.health_server import health_port, health_server
from bagua_launch.node_facts import ThisNode
from tests.lab.free_port import free_port
from tests.lab.wait import eventually
from tests.peers.conftest import Launch

SHOWS = "import os\nprint(os.environ.get(%r))\n"


def check(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_signals_to_handle_reach_the_workers(launch: Launch) -> None:
    script = SHOWS % "TORCHELASTIC_SIGNALS_TO_HANDLE"
    hangup = "" if ThisNode().ignores("SIGHUP") else "SIGHUP,"  # as where these tests run under nohup
    assert launch(script=script).stdout == f"SIGTERM,SIGINT,{hangup}SIGQUIT\n"
    assert launch("--signals-to-handle", "SIGTERM,SIGUSR1", script=script).stdout == "SIGTERM,SIGUSR1\n"


def test_python_exec_names_the_workers_interpreter(launch: Launch, tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=1 exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    done = launch(script=SHOWS % "WRAPPED", env={"PYTHON_EXEC": str(wrapper)}, start_method="spawn")
    assert done.stdout == "1\n"


def test_a_running_job_is_healthy(launch: Launch) -> None:
    port = free_port()
    script = (
        "import os, urllib.request\n"
        "url = 'http://127.0.0.1:' + os.environ['TORCHELASTIC_HEALTH_CHECK_PORT']\n"
        "print(urllib.request.urlopen(url, timeout=20).read())\n"
    )
    done = launch(script=script, env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    assert done.stdout == "b'alive\\n'\n", done.stderr


def test_a_client_that_sends_a_byte_at_a_time_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua_agent.base.small_http.REQUEST_TIMEOUT_S", 1.0)
    port = free_port()
    server = health_server(port, lambda question: question.answered.set())
    server.start()
    ended = threading.Event()

    def send_slowly(slow: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.2):  # within the time of each read
                slow.sendall(b"G")

    try:
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"G")
            sender = threading.Thread(target=send_slowly, args=(slow,))
            sender.start()
            began_s = time.monotonic()
            assert check(port) == 200
            assert time.monotonic() - began_s < 5.0
            ended.set()
            sender.join(5.0)
    finally:
        ended.set()
        server.stop()


def test_an_agent_whose_loop_is_stuck_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua_agent.base.loop_health.ANSWER_TIMEOUT_S", 0.2)
    asked: list[HealthAsked] = []
    answers = threading.Event()

    def loop(question: HealthAsked) -> None:
        asked.append(question)
        if answers.is_set():
            question.answered.set()

    port = free_port()
    server = health_server(port, loop)
    server.start()
    try:
        assert check(port) == 200, "it still joins the job"
        answers.set()
        assert check(port) == 200
        answers.clear()
        assert check(port) == 503
        answers.set()
        assert check(port) == 200
        assert len(asked) == 4
    finally:
        server.stop()


@pytest.mark.parametrize("text", ["x", "0", "70000", "-1", "8" * 5000])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no port"):
        health_port({"TORCHELASTIC_HEALTH_CHECK_PORT": text})


def test_a_taken_port_costs_the_checks_alone(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = launch(script="print('ran')", env={"TORCHELASTIC_HEALTH_CHECK_PORT": port})
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert f"no health checks at port {port}" in done.stderr


TIMES = """
import os, time
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60):
    print("in time", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    raise SystemExit(0)
with timer.expires(after=0.5):
    time.sleep(60)
"""


def test_a_worker_that_misses_its_deadline_is_killed_and_started_again(launch: Launch) -> None:
    done = launch(script=TIMES, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, start_method="warm")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in time\nin time\n"
    assert "has expired; it gets signal 9" in done.stderr and "killed by SIGKILL" in done.stderr


def test_without_the_switch_there_are_no_timers(tmp_path: Path) -> None:
    assert timer_file({}, tmp_path) is None
    assert timer_file({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, tmp_path) is None
    given = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "/x"}
    assert timer_file(given, tmp_path) == Path("/x")


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{", b"[]", b"[" * 3000),
        b'{"pid": 1, "scope_id": "s", "expiration_time": 1, "signal": 9}',
        b'{"pid": 9, "scope_id": "s", "expiration_time": NaN, "signal": 9}',
        b'{"pid": 9, "scope_id": "s", "expiration_time": 1, "signal": 900}',
    ],
)
def test_what_is_no_request_is_ignored(line: bytes) -> None:
    assert parse_request(line) is None


def test_processes_of_others_are_not_signalled(tmp_path: Path) -> None:
    path, asked = tmp_path / "timers", list[tuple[int, int]]()

    def refuse(pid: int, number: int) -> bool:
        asked.append((pid, number))
        return False

    timers = FileTimers(path, refuse)
    timers.start()
    other = subprocess.Popen([sys.executable, "-c", "import time\ntime.sleep(60)"])
    try:
        request = {"version": 1, "pid": other.pid, "scope_id": "s", "signal": 9}
        with path.open("w") as fifo:
            fifo.write("nonsense\n" + json.dumps({**request, "expiration_time": time.time() - 1}) + "\n")
        eventually(lambda: asked == [(other.pid, signal.SIGKILL)], 10, "the timer did not expire")
        assert other.poll() is None
    finally:
        timers.stop()
        other.kill()
        other.wait(10)
    assert not os.path.lexists(path)
    assert parse_request(b'{"pid":5,"scope_id":"s","expiration_time":2,"signal":0}') == Timer(5, "s", 2.0, 0)


def test_a_file_that_is_no_fifo_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("data")
    with pytest.raises(UserError, match="TORCHELASTIC_TIMER_FILE"):
        FileTimers(tmp_path / "mine", lambda pid, number: True)
    assert (tmp_path / "mine").read_text() == "data"


def test_a_job_under_another_account_does_not_command_its_agent() -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "train.py")
    job = {"TORCHELASTIC_ERROR_FILE": "/etc/passwd"}
    assert launcher_variables(JobConfig("job", command), job) == job
    assert launcher_variables(JobConfig("job", command, run_as="nobody"), job) == {}
