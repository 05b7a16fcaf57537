"""Real processes: stacks are written whatever their threads do, and asking never takes longer than allowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bagua_agent.workers import stacks
from bagua_agent.workers.collectives import NoCollectives, collectives_of
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.process.process_status import process_status, processes_of, signal_status
from bagua_agent.workers.process.stack_channel import (
    COLLECTIVES,
    DESCRIPTORS_VARIABLE,
    LARGEST_ANSWER_BYTES,
    StackChannel,
)
from bagua_agent.workers.stacks import FILES_KEPT, NoAnswer, StackTarget, save_stacks, stacks_of
from tests.agent.workers.worker_lab import wait_until
from tests.lab.wait import HANG_S

STACK_DUMP = Path(__file__).parents[3] / "bagua_core" / "worker" / "stack_dump.py"
PRELUDE = f"""
import os, signal, sys, threading, time, runpy
number = runpy.run_path({str(STACK_DUMP)!r})["answer_stack_requests"]()
assert number, "no signal"
def ready(text="ready"):
    print(text, flush=True)
"""
# As where another thread holds the GIL: only the signal is left.
NO_THREAD = "import _thread\n_thread.start_new_thread = lambda *_: None\n" + PRELUDE


class Script(subprocess.Popen[str]):
    """A worker as far as this is concerned: a process with a stack channel."""

    def __init__(self, path: Path) -> None:
        self.channel = StackChannel()
        ends = self.channel.workers_ends
        super().__init__(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=ends,
            env={**os.environ, DESCRIPTORS_VARIABLE: ",".join(map(str, ends))},
        )
        self.channel.passed()

    def target(self, directory: Path = Path("/nowhere"), worker_id: str = "w0") -> StackTarget:
        return StackTarget(worker_id, self.pid, directory, self.channel)


class Scripts:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Script] = []

    def start(self, source: str, prelude: str = PRELUDE) -> tuple[Script, str]:
        """The process, and the line it printed when it was where it should be."""
        path = self._directory / f"script{len(self._started)}.py"
        path.write_text(prelude + source)
        process = Script(path)
        self._started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def clean_up(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=HANG_S)
            assert process.stdout is not None
            process.stdout.close()
            process.channel.close()


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    made = Scripts(tmp_path)
    yield made
    made.clean_up()


def saved(process: Script, directory: Path, **options: float) -> tuple[str, str]:
    (result,) = save_stacks([process.target(directory)], "a test", native=False, **options)
    assert result.path is not None
    return result.path.read_text(), result.problem


def test_tight_python_loop_and_a_second_thread(scripts: Scripts, tmp_path: Path) -> None:
    process, _ = scripts.start(
        "def sleeper():\n    time.sleep(60)\nthreading.Thread(target=sleeper, daemon=True).start()\n"
        "def spin():\n    ready()\n    while True:\n        pass\nspin()\n"
    )
    text, problem = saved(process, tmp_path)
    assert problem == ""
    assert "in spin" in text and "in sleeper" in text
    assert "saved because: a test" in text and "3 threads" in text
    assert list(tmp_path.glob("stacks-*Z.txt"))
    assert process.poll() is None, "asking must not end it"


def test_loop_in_c_that_keeps_the_gil(scripts: Scripts, tmp_path: Path) -> None:
    # PyDLL keeps the GIL during the call
    process, _ = scripts.start(
        "import ctypes\nsleep = ctypes.PyDLL(None).usleep\n"
        "def hold():\n    ready()\n    while True:\n        sleep(60_000_000)\nhold()\n"
    )
    text, problem = saved(process, tmp_path)
    assert problem == "" and "in hold" in text


def test_threads_that_come_and_go_do_not_end_the_process(scripts: Scripts) -> None:
    process, _ = scripts.start(
        "def come_and_go():\n"
        "    while True:\n"
        "        some = [threading.Thread(target=time.sleep, args=(0.0005,)) for _ in range(3)]\n"
        "        for one in some:\n            one.start()\n"
        "        for one in some:\n            one.join()\n"
        "threading.Thread(target=come_and_go, daemon=True).start()\n"
        "def wait():\n    ready()\n    while True:\n        threading.Event().wait(0.05)\nwait()\n"
    )
    for _ in range(200):
        assert "in wait" in stacks_of(process.target(), process.pid)
    assert process.poll() is None


def test_again_and_again_gives_one_answer_each(scripts: Scripts) -> None:
    process, _ = scripts.start("def here():\n    ready()\n    time.sleep(60)\nhere()\n")
    answers = [stacks_of(process.target(), process.pid) for _ in range(5)]
    assert [a.count("in here") for a in answers] == [1] * 5


def test_forked_child_is_shown_apart(scripts: Scripts, tmp_path: Path) -> None:
    process, child = scripts.start(
        "def child():\n    ready(str(os.getpid()))\n    time.sleep(60)\n"
        "def parent():\n    time.sleep(60)\n"
        "child() if os.fork() == 0 else parent()\n"
    )
    text, problem = saved(process, tmp_path)
    first, second = text.split(f"== process {child}")
    assert problem == ""
    assert "in parent" in first and "in child" not in first and "in child" in second


def test_child_that_is_no_python_is_described_and_survives(scripts: Scripts, tmp_path: Path) -> None:
    process, child = scripts.start(
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nready(str(child.pid))\nchild.wait()\n"
    )
    text, problem = saved(process, tmp_path)
    assert problem == ""
    section = text.split(f"== process {child}")[1]
    assert "sleep 60" in section and "no Python of ours" in section
    assert process_status(int(child)) is not None


def test_stopped_process_is_said_to_be_stopped_and_not_waited_for(scripts: Scripts, tmp_path: Path) -> None:
    process, _ = scripts.start("ready()\ntime.sleep(60)\n")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: (s := process_status(process.pid)) is not None and s.is_stopped, "stopped")
    began_s = time.monotonic()
    text, problem = saved(process, tmp_path)
    assert time.monotonic() - began_s < 1.0
    assert "is stopped (state T)" in problem and "is stopped (state T)" in text


def test_blocked_signal_is_bounded_and_said(scripts: Scripts, tmp_path: Path) -> None:
    process, _ = scripts.start(
        "signal.pthread_sigmask(signal.SIG_BLOCK, {number})\nready()\ntime.sleep(60)\n", NO_THREAD
    )
    with pytest.raises(NoAnswer, match="did not take the signal, which it blocks"):
        stacks_of(process.target(), process.pid, 0.1)


def test_a_process_that_would_die_of_the_signal_is_not_sent_it(scripts: Scripts) -> None:
    process, _ = scripts.start("signal.signal(number, signal.SIG_DFL)\nready()\ntime.sleep(60)\n", NO_THREAD)
    with pytest.raises(NoAnswer, match="would kill it"):
        stacks_of(process.target(), process.pid)
    assert process.poll() is None


def test_a_file_that_the_script_closed_is_not_written_to(scripts: Scripts) -> None:
    process, _ = scripts.start("os.closerange(3, 1024)\nready()\ntime.sleep(60)\n")
    with pytest.raises(NoAnswer, match="no place"):
        stacks_of(process.target(), process.pid)


def test_ended_process_and_a_directory_that_is_gone(scripts: Scripts, tmp_path: Path) -> None:
    process, _ = scripts.start("ready()\n")
    process.wait(timeout=HANG_S)
    (result,) = save_stacks([process.target(tmp_path / "gone")], "a test", native=False)
    assert result.path is None
    assert "ended" in result.problem and "can't be written" in result.problem


def test_several_workers_are_asked_side_by_side(scripts: Scripts, tmp_path: Path) -> None:
    silent = "signal.pthread_sigmask(signal.SIG_BLOCK, {number})\nready()\ntime.sleep(60)\n"
    started = [scripts.start(silent, NO_THREAD)[0] for _ in range(3)]
    targets = []
    for number, process in enumerate(started):
        (tmp_path / str(number)).mkdir()
        targets.append(process.target(tmp_path / str(number), f"w{number}"))
    began_s = time.monotonic()
    results = save_stacks(targets, "a test", within_s=0.5, native=False)
    assert time.monotonic() - began_s < 1.4
    assert [r.worker_id for r in results] == ["w0", "w1", "w2"]
    assert all(r.path and "did not take" in r.problem for r in results)


def test_only_so_many_files_are_kept(scripts: Scripts, tmp_path: Path) -> None:
    for number in range(FILES_KEPT + 4):
        path = tmp_path / f"stacks-{number:03}.txt"
        path.write_text("")
        os.utime(path, (number, number))
    process, _ = scripts.start("ready()\ntime.sleep(60)\n")
    saved(process, tmp_path)
    names = sorted(p.name for p in tmp_path.glob("stacks-*.txt"))
    assert len(names) == FILES_KEPT and names[0] == "stacks-000.txt" and "stacks-001.txt" not in names


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo native frames of $4", "-- native stacks, by py-spy\nnative frames of "),
        ("echo Permission denied >&2; exit 1", "-- no native stacks: py-spy: Permission denied"),
    ],
)
def test_native_stacks_where_the_tool_is(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str
) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    process, _ = scripts.start("ready()\ntime.sleep(60)\n")
    monkeypatch.setattr(stacks.shutil, "which", lambda name: str(tool))
    (result,) = save_stacks([process.target(tmp_path)], "a test")
    assert result.path is not None and expected in result.path.read_text()


def test_low_descriptors_and_taken_signals_stay_the_scripts_own(scripts: Scripts) -> None:
    prelude = PRELUDE.replace(
        "number = ", "signal.signal(signal.SIGRTMAX - 3, lambda *_: None)\nnumber = ", 1
    )
    _, line = scripts.start(
        "import stat\nfd = os.open('/dev/null', os.O_RDONLY)\nready(f'{fd} {number == signal.SIGRTMAX - 4}')\n",
        prelude,
    )
    assert line == "3 True"


def test_a_signal_that_the_script_blocks_waits_for_it(scripts: Scripts, tmp_path: Path) -> None:
    """As in a script of one thread: another that takes it would end the process."""
    process, _ = scripts.start(
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})\n"
        "ready()\n"
        "signal.sigwait({signal.SIGUSR1})\n"
        "sys.exit(0 if signal.sigwait({signal.SIGTERM}) == signal.SIGTERM else 1)\n"
    )
    assert "2 threads" in saved(process, tmp_path)[0], "the other thread is up"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
    assert process.wait(timeout=HANG_S) == 0


def test_what_the_kernel_says_of_this_process() -> None:
    status = process_status(os.getpid())
    assert status is not None and status.parent_pid == os.getppid() and status.cpu_s > 0
    assert not status.is_stopped
    masks = signal_status(os.getpid(), signal.SIGINT)
    assert masks is not None and masks.caught and not masks.pending
    assert processes_of(os.getpid())[0] == os.getpid()
    assert process_status(2**22 + 1) is None and signal_status(2**22 + 1, 10) is None


# -- workers that mean harm


def test_a_file_that_a_worker_names_is_not_written(scripts: Scripts, tmp_path: Path) -> None:
    """O_PATH needs no right to the file; a process that opens it again through /proc needs its own."""
    victim = tmp_path / "victim"
    victim.write_text("the agent's")
    process, _ = scripts.start(
        f"victim = os.open({str(victim)!r}, os.O_PATH)\n"
        "named = os.memfd_create(f'bagua-stacks-{signal.SIGRTMAX}-{victim}-{os.getpid()}')\n"
        "ready()\ntime.sleep(60)\n",
        "import os, signal, time\ndef ready():\n    print('ready', flush=True)\n",
    )
    _, problem = saved(process, tmp_path)
    assert victim.read_text() == "the agent's"
    assert "no place to write them to" in problem


# What such a worker has of its channel, without our own code.
OWN_CHANNEL = (
    "import fcntl, os, signal, sys, time\n"
    "channel, requests = map(int, os.environ['BAGUA_STACK_FDS'].split(','))\n"
    "def ready():\n    print('ready', flush=True)\n"
)


@pytest.mark.parametrize(
    "first_line",
    [
        "{signal.SIGTERM} {channel}",
        "-1 {channel}",
        "64000 {channel}",
        "60 " + "9" * 50,
        "60",
        "\0 \0",
        "²³ 3",
    ],
)
def test_a_channel_that_says_nonsense_is_not_used(scripts: Scripts, tmp_path: Path, first_line: str) -> None:
    process, _ = scripts.start(
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(3))\n"
        f"os.write(channel, (f{first_line!r} + '\\n').encode())\nready()\ntime.sleep(60)\n",
        OWN_CHANNEL,
    )
    _, problem = saved(process, tmp_path)
    assert "no place to write them to" in problem
    assert process.poll() is None, "it was sent no signal"


def test_an_answer_of_gigabytes_is_cut(scripts: Scripts, tmp_path: Path) -> None:
    process, _ = scripts.start(
        "def big(*_):\n    os.ftruncate(channel, 2 << 30)\n"
        "signal.signal(signal.SIGRTMAX, big)\n"
        "os.write(channel, f'{signal.SIGRTMAX} {channel}\\n'.encode())\n"
        "ready()\nwhile True: time.sleep(60)\n",
        OWN_CHANNEL,
    )
    tracemalloc.start()
    try:
        text, problem = saved(process, tmp_path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert problem == "" and process.channel.written_bytes() == 2 << 30, "it answered as large as that"
    assert LARGEST_ANSWER_BYTES < len(text) < 2 * LARGEST_ANSWER_BYTES
    assert peak_bytes < 64 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change users")
def test_a_process_of_another_user_is_not_sent_the_signal(scripts: Scripts, tmp_path: Path) -> None:
    process, _ = scripts.start("ready()\ntime.sleep(60)\n")
    # This worker is root's, as a setuid program is
    other = Account("other", 65534, 65534, (65534,), "/", "/bin/sh")
    with pytest.raises(NoAnswer, match="runs as another user than the worker's, 65534"):
        stacks_of(replace(process.target(), account=other), process.pid)


def test_links_in_place_of_stack_files_are_not_followed(scripts: Scripts, tmp_path: Path) -> None:
    """As many as there are names for the next minute."""
    victim = tmp_path / "victim"
    victim.write_text("the agent's")
    directory = tmp_path / "logs"
    directory.mkdir()
    now = int(time.time())
    for second in range(now, now + 60):
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(second))
        (directory / f"stacks-{stamp}Z.txt").symlink_to(victim)
    process, _ = scripts.start("ready()\ntime.sleep(60)\n")
    saved(process, directory)
    assert victim.read_text() == "the agent's"


def test_a_channel_that_is_closed_while_it_is_asked(scripts: Scripts) -> None:
    process, _ = scripts.start("ready()\ntime.sleep(60)\n")
    with process.channel.held() as is_open:
        process.channel.close()
        assert is_open and process.channel.place() is not None, "its descriptors are still ours"
    with pytest.raises(NoAnswer, match="has ended"):
        stacks_of(process.target(), process.pid)
    with process.channel.held() as is_open:
        assert not is_open


def refuses(holder: Script) -> bool:
    try:
        collectives_of(holder.target())
    except NoCollectives as error:
        return "holds Python's interpreter lock" in str(error)
    return False


def test_collectives_are_asked_for_on_the_same_channel(scripts: Scripts, tmp_path: Path) -> None:
    process, _ = scripts.start("def here():\n    ready()\n    time.sleep(60)\nhere()\n")
    answers = [json.loads(collectives_of(process.target())) for _ in range(3)]
    assert answers[0]["groups"] == [] and "not imported torch.distributed" in answers[2]["torch_problem"]
    assert process.channel.ask(COLLECTIVES)  # one that is not waited for
    assert stacks_of(process.target(), process.pid).count("in here") == 1
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: (s := process_status(process.pid)) is not None and s.is_stopped, "it is stopped")
    with pytest.raises(NoCollectives, match=r"is stopped \(state T\) and can"):
        collectives_of(process.target())
    holder, _ = scripts.start(
        "import ctypes\nsleep = ctypes.PyDLL(None).usleep\nready()\nwhile True:\n    sleep(60_000_000)\n"
    )
    wait_until(lambda: refuses(holder), "it sleeps with the lock held; before that it answers")
    with pytest.raises(NoCollectives, match="no Python of ours"):
        collectives_of(replace(process.target(), channel=None))
