"""A worker forked from the warm parent must not be told from a spawned one, nor depend on its parent."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.worker_process import WorkerProcess
from bagua_agent.workers.start.warm_fit import StartPlace
from bagua_agent.workers.start.warm_parent import WarmParent
from tests.agent.workers.test_run_script import FAILURES, IDENTITY
from tests.agent.workers.worker_lab import DEADLINE_S, Workers, base_environment, is_running, wait_until
from tests.lab.left_open import open_descriptors, opened_since

COMMAND = WorkerCommand(CommandKind.SCRIPT, "script.py", ("a", "--b"))

REPORT = """
import faulthandler, gc, json, os, resource, signal, sys, threading
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
def stream(s):
    return [s.name, s.mode, s.encoding, s.errors, s.newlines, s.line_buffering, s.write_through, s.isatty(),
            type(s.buffer).__name__, s.fileno(), s.seekable(), s.readable(), s.buffer.name]
def limit(number):
    try:
        return resource.getrlimit(number)
    except ValueError:
        return None
frame, frames = sys._getframe(), []
while frame is not None:
    frames.append(frame.f_code.co_name)
    frame = frame.f_back
print(json.dumps({
    "argv": [sys.argv, sys.orig_argv, sys.path, sys.executable, list(sys.flags), sys.warnoptions],
    "main": sorted(n for n in sys.modules["__main__"].__dict__ if n.startswith("_")),
    "frames": frames,
    "environ": dict(os.environ),
    "shown": [open("/proc/self/cmdline").read(), open("/proc/self/comm").read()],
    "shown environ": sorted(v for v in open("/proc/self/environ", errors="surrogateescape").read().split("\\0")
                            if "_GATE_FD" not in v and "_STACK_FDS" not in v),
    "ids": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getppid(), os.getcwd(), os.getuid()],
    "signals": {k: status[k] for k in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")},
    "handlers": [str(signal.getsignal(n)) for n in (2, 13, 15)],
    "limits": [limit(n) for n in range(16)], "nice": os.nice(0), "umask": status["Umask"],
    "processors": sorted(os.sched_getaffinity(0)),
    "streams": [stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd")
                          if int(n) < 200 and os.path.exists(f"/proc/self/fd/{n}")),
    "stdin": sys.stdin.read(),
    "runtime": [faulthandler.is_enabled(), gc.isenabled(), gc.get_threshold(), threading.active_count(),
                threading.current_thread() is threading.main_thread(), sys.getrecursionlimit()],
    "threads": __import__("torch").get_num_threads(),
}))
"""

RANDOM = """
import json, multiprocessing, random, tempfile, torch, numpy
print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(),
    multiprocessing.current_process().authkey.hex(), next(tempfile._get_candidate_names())]))
"""

WAITING = "import os, signal\nprint(os.getpid(), flush=True)\nwhile True: signal.pause()\n"


@pytest.fixture(scope="module")
def torch_parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WarmParent, Path]]:
    directory = tmp_path_factory.mktemp("warm")
    (directory / "script.py").write_text("")
    made = WarmParent(COMMAND, base_environment(), directory=directory, preimport=("torch",))
    made.start()
    yield made, directory
    made.stop()


@pytest.fixture
def warm(workers: Workers, torch_parent: tuple[WarmParent, Path]) -> WarmParent:
    parent, workers.directory = torch_parent
    return parent


def start(workers: Workers, source: str, warm: WarmParent | None, **options: object) -> WorkerProcess:
    workers.script(source)
    return workers.start("script.py", *COMMAND.args, warm=warm, **({"preimport": ("torch",)} | options))  # type: ignore[arg-type]


def is_forked(worker: WorkerProcess) -> bool:
    return type(worker._popen).__name__ == "AdoptedProcess"


def test_both_ways_report_the_same(workers: Workers, warm: WarmParent) -> None:
    env = {"RANK": "3", "BAGUA_X": "caf\udce9 \u20ac", "TORCHELASTIC_RUN_ID": "x=y"}
    reports = []
    for parent in (warm, None):
        worker = start(workers, REPORT, parent, env=env, gated=True)
        assert is_forked(worker) == (parent is not None)
        assert worker.open_gate()
        ended = workers.to_end(worker)
        assert (ended.returncode, ended.stderr) == (0, "")
        reports.append(json.loads(ended.stdout))
    forked, spawned = reports
    for part in spawned:
        assert forked[part] == spawned[part], part
    assert forked["environ"]["RANK"] == "3" and forked["ids"][2] == os.getpid()


def test_random_state_and_secrets_are_each_workers_own(workers: Workers, warm: WarmParent) -> None:
    drawn = [json.loads(workers.to_end(start(workers, RANDOM, warm)).stdout) for _ in range(2)]
    for mine, others in zip(*drawn, strict=True):
        assert mine != others


def test_ends_as_a_spawned_worker(workers: Workers) -> None:
    workers.script("")
    parent = WarmParent(COMMAND, base_environment(), directory=workers.directory, preimport=())
    parent.start()
    try:
        for name, source in {**FAILURES, "identity": IDENTITY}.items():
            forked = start(workers, source, parent, preimport=())
            assert is_forked(forked)
            ended = workers.to_end(forked)
            assert ended == workers.to_end(start(workers, source, None, preimport=())), name
    finally:
        parent.stop()


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(workers: Workers, warm: WarmParent, method: str, guarded: bool) -> None:
    if not guarded and method != "fork":
        source = "import multiprocessing\nprint('no guard, no children')\n"
        expected = "no guard, no children\n"
    else:
        source = f"""
import multiprocessing
class Job:
    def __init__(self, n): self.n = n
def work(job): return Job(job.n * 2)
if {not guarded} or __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        print([j.n for j in pool.map(work, [Job(1), Job(2)])])
"""
        expected = "[2, 4]\n"
    ended = workers.to_end(start(workers, source, warm))
    assert (ended.returncode, ended.stdout) == (0, expected), ended.stderr


def test_data_loader_and_blas_in_a_forked_worker(workers: Workers, warm: WarmParent) -> None:
    source = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    a = torch.rand(300, 300)
    assert torch.allclose((a @ a).double(), a.double() @ a.double(), atol=1e-2)
    print([int(b.sum()) for b in DataLoader(torch.arange(8), batch_size=4, num_workers=2)])
"""
    ended = workers.to_end(start(workers, source, warm))
    assert (ended.returncode, ended.stdout) == (0, "[6, 22]\n"), ended.stderr


def test_exit_codes_signals_and_the_whole_group(workers: Workers, warm: WarmParent) -> None:
    assert workers.to_end(start(workers, "import sys\nsys.exit(7)\n", warm)).returncode == 7
    assert workers.to_end(start(workers, "import os\nos.abort()\n", warm)).returncode == -signal.SIGABRT
    grandchild_source = "import subprocess\np = subprocess.Popen(['sleep', '60'])\nprint(p.pid)\np.wait()\n"
    worker = start(workers, grandchild_source, warm)
    grandchild = int(workers.read_line(worker))
    assert worker.signal_group(signal.SIGKILL)
    assert workers.to_end(worker).returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(grandchild), "group killed")


def test_gate_refused_or_closed_ends_quietly(workers: Workers, warm: WarmParent) -> None:
    worker = start(workers, "print('ran')\n", warm, gated=True)
    assert is_forked(worker) and worker.reap() is None
    assert worker.refuse_gate()
    ended = workers.to_end(worker)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_processors(workers: Workers, warm: WarmParent) -> None:
    cpu = min(os.sched_getaffinity(0))
    source = "import os\nprint(os.sched_getaffinity(0))\n"
    worker = start(workers, source, warm, cpus=frozenset({cpu}))
    assert is_forked(worker) == ("OMP_NUM_THREADS" in os.environ)
    assert workers.to_end(worker).stdout == f"{{{cpu}}}\n"


def test_twenty_in_a_row_are_fast_and_leak_nothing(workers: Workers, warm: WarmParent) -> None:
    source = "import os, time, torch\nprint(time.process_time())\nos._exit(0)\n"
    workers.to_end(start(workers, source, warm))
    assert warm.pid is not None
    children_before = set(psutil.Process().children())
    open_here, open_there = open_descriptors(), open_descriptors(warm.pid)
    used_s = []
    for _ in range(20):
        worker = start(workers, source, warm)
        assert is_forked(worker)
        used_s.append(float(workers.to_end(worker).stdout))
        for fd in (worker.stdout_fd, worker.stderr_fd):
            assert fd is not None
            os.close(fd)
        worker.close()
        workers.started.remove(worker)
    assert not opened_since(open_here) and not opened_since(open_there, warm.pid)
    left = set(psutil.Process().children()) - children_before
    assert (
        not [p for p in left if p.status() == psutil.STATUS_ZOMBIE]
        and not psutil.Process(warm.pid).children()
    )
    its_imports_s = psutil.Process(warm.pid).cpu_times().user
    print(f"a worker's processor time at its first line: median {statistics.median(used_s) * 1000:.0f} ms")
    assert statistics.median(used_s) < 0.1 * its_imports_s, "it imports nothing again"


def test_memory_is_shared(workers: Workers, warm: WarmParent) -> None:
    used_bytes = []
    workers.script("import torch\n" + WAITING)
    for parent in (warm, None):
        # written once: a worker may be reading it already while the next one is started
        started = [workers.start("script.py", preimport=("torch",), warm=parent) for _ in range(2)]
        for worker in started:
            workers.read_line(worker)
        used_bytes.append(sum(psutil.Process(worker.pid).memory_full_info().pss for worker in started))
    print(f"PSS of two: {used_bytes[0] >> 20} MiB forked, {used_bytes[1] >> 20} MiB spawned")
    assert used_bytes[0] < used_bytes[1] * 0.7  # a third of what is shared counts for the parent


def test_what_imports_print_comes_from_every_worker(workers: Workers) -> None:
    workers.script("import sys\nprint('loud')\nprint('louder', file=sys.stderr)\n", "loud_module.py")
    workers.script("print('ran')\n")
    parent = WarmParent(
        COMMAND, base_environment(), directory=workers.directory, preimport=("loud_module", "missing")
    )
    parent.start()
    try:
        for _ in range(2):
            worker = start(workers, "print('ran')\n", parent, preimport=("loud_module",))
            assert is_forked(worker)
            ended = workers.to_end(worker)
            assert (ended.stdout, ended.stderr) == ("loud\nran\n", "louder\n")
    finally:
        parent.stop()


HOLDS_ITSELF = """
import os
nb_meta = type("nb_meta", (type,), {"__module__": "nanobind"})
class Held:
    def __del__(self, write=os.write):
        write(2, b"collected\\n")
held = Held()
held.itself = held
"""


def test_what_was_imported_ahead_is_collected_at_the_end_where_nanobind_reports_it(workers: Workers) -> None:
    workers.script(HOLDS_ITSELF, "holds_itself.py")
    workers.script("")
    parent = WarmParent(COMMAND, base_environment(), directory=workers.directory, preimport=("holds_itself",))
    parent.start()
    try:
        for source, code in (("", 0), ("raise SystemExit(3)\n", 3)):
            worker = start(workers, source, parent, preimport=("holds_itself",))
            assert is_forked(worker)
            ended = workers.to_end(worker)
            assert (ended.returncode, ended.stderr) == (code, "collected\n")
    finally:
        parent.stop()


def test_what_a_module_imported_ahead_holds_is_destroyed_at_the_end(workers: Workers) -> None:
    """A file that the script left in it, and torch's process groups, which complete what is under way."""
    workers.script("held = []\n", "imported_ahead.py")
    workers.script("")
    parent = WarmParent(
        COMMAND, base_environment(), directory=workers.directory, preimport=("imported_ahead",)
    )
    leaves = "import imported_ahead\nimported_ahead.held.append(open('text.txt', 'w'))\n"
    parent.start()
    try:
        worker = start(
            workers,
            leaves + "imported_ahead.held[0].write('not closed')\n",
            parent,
            preimport=("imported_ahead",),
        )
        assert is_forked(worker)
        assert workers.to_end(worker).returncode == 0
        assert (workers.directory / "text.txt").read_text() == "not closed"
    finally:
        parent.stop()


def test_killed_under_running_workers_it_is_replaced(workers: Workers) -> None:
    workers.script(WAITING)
    parent = WarmParent(COMMAND, base_environment(), directory=workers.directory, preimport=())
    parent.start()
    try:
        forked = start(workers, WAITING, parent, preimport=())
        workers.read_line(forked)
        first = parent.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: parent.pid is None, "death seen")
        assert is_running(forked.pid) and forked.reap() is None
        meanwhile = start(workers, WAITING, parent, preimport=())
        assert not is_forked(meanwhile)
        workers.read_line(meanwhile)
        wait_until(lambda: parent.pid not in (None, first), "another one")
        later = start(workers, WAITING, parent, preimport=())
        assert is_forked(later)
        workers.read_line(later)
        for worker in (forked, meanwhile, later):
            assert worker.signal_group(signal.SIGTERM)
            assert workers.to_end(worker).returncode == -signal.SIGTERM
    finally:
        parent.stop()
    assert parent.pid is None


def test_a_stop_in_the_middle_of_the_imports_is_no_trouble(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.script("")
    workers.script("import os, signal\nopen('imports', 'w').close()\nsignal.pause()\n", "pausing_module.py")
    parent = WarmParent(
        COMMAND, base_environment(), directory=workers.directory, preimport=("pausing_module",)
    )
    parent.start()
    waiting = threading.Thread(target=parent.wait_ready, args=(DEADLINE_S,))
    waiting.start()
    wait_until((workers.directory / "imports").exists, "it imports")
    parent.stop()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert not caplog.messages


def test_a_stop_that_has_begun_needs_no_caller_that_waits(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.script("")
    parent = WarmParent(COMMAND, base_environment(), directory=workers.directory, preimport=())
    parent.start()
    assert parent.wait_ready()
    pid = parent.pid
    assert pid is not None
    parent.begin_stop()
    wait_until(lambda: not is_running(pid), "its end")
    parent.stop()
    assert parent.pid is None and not caplog.records


def test_one_whose_imports_hang_is_replaced_each_time_later(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bagua_agent.workers.start.warm_parent.WARM_UP_TIMEOUT_S", 0.3)
    monkeypatch.setattr("bagua_agent.workers.start.warm_parent.LONG_LIFE_S", 0.1)
    workers.script("")
    workers.script("import signal\nsignal.pause()\n", "pausing_module.py")
    parent = WarmParent(
        COMMAND, base_environment(), directory=workers.directory, preimport=("pausing_module",)
    )
    parent.start()
    try:
        first = parent.pid
        assert first is not None
        wait_until(lambda: parent.pid not in (None, first), "another one")
        assert f"the warm parent (pid {first}) has not imported everything in 0.3 s" in caplog.messages
        assert not is_running(first)
        wait_until(lambda: parent._deaths_in_a_row >= 2, "hanging for long is no long life")
    finally:
        parent.stop()


def test_while_it_imports_workers_are_spawned_at_once_and_it_is_used_later(workers: Workers) -> None:
    workers.script("print('ran')\n")
    go_on = workers.directory / "go_on"
    os.mkfifo(go_on)
    workers.script("open('go_on').close()\n", "waiting_module.py")
    parent = WarmParent(
        COMMAND, base_environment(), directory=workers.directory, preimport=("waiting_module",)
    )
    parent.start()
    waiting = threading.Thread(target=parent.wait_ready, args=(DEADLINE_S,))
    waiting.start()  # as at the start of a node
    try:
        place = StartPlace(base_environment(), workers.directory, sys.executable, ("waiting_module",))
        began_s = time.monotonic()
        assert parent.fork(COMMAND, place, (), None) is None
        assert time.monotonic() - began_s < 1.0
        go_on.open("w").close()
        waiting.join(DEADLINE_S)
        worker = start(workers, "print('ran')\n", parent, preimport=("waiting_module",))
        assert is_forked(worker)
        assert workers.to_end(worker).stdout == "ran\n"
    finally:
        parent.stop()
        waiting.join(DEADLINE_S)


def test_a_stopped_parent_that_does_not_answer_is_given_up(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bagua_agent.workers.start.warm_parent.FORK_TIMEOUT_S", 0.3)
    workers.script("print('ran')\n")
    parent = WarmParent(COMMAND, base_environment(), directory=workers.directory, preimport=())
    parent.start()
    try:
        assert parent.wait_ready(DEADLINE_S) and parent.pid is not None
        os.kill(parent.pid, signal.SIGSTOP)
        worker = start(workers, "print('ran')\n", parent, preimport=())
        assert not is_forked(worker)
        assert workers.to_end(worker).stdout == "ran\n"
    finally:
        parent.stop()


AGENT = """
import os, signal, sys
from pathlib import Path
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.start.spawn import spawn_worker
from bagua_agent.workers.start.warm_parent import WarmParent
command = WorkerCommand(CommandKind.SCRIPT, "script.py")
directory = Path(sys.argv[1])
warm = WarmParent(command, dict(os.environ), directory=directory, preimport=())
warm.start()
assert warm.wait_ready()
worker = spawn_worker(command, dict(os.environ), worker_id="w", slot=0, directory=directory, gated=False,
                      preimport=(), warm=warm)
os.set_blocking(worker.stdout_fd, True)
assert int(os.read(worker.stdout_fd, 100)) == worker.pid
print(warm.pid, worker.pid, type(worker._popen).__name__, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_agent_leaves_nothing(workers: Workers, number: signal.Signals) -> None:
    workers.script(WAITING)
    line = [sys.executable, "-c", AGENT, str(workers.directory)]
    agent = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    try:
        *words, kind = agent.stdout.readline().split()
        pids = [int(word) for word in words]
        assert kind == "AdoptedProcess" and len(pids) == 2 and all(is_running(pid) for pid in pids)
    finally:
        agent.send_signal(number)
        agent.wait(10)
        agent.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "warm parent and worker gone")


def test_what_cannot_be_run_is_said_at_the_start(tmp_path: Path) -> None:
    parent = WarmParent(COMMAND, base_environment(), directory=tmp_path)
    with pytest.raises(UserError, match=r"script.py"):
        parent.start()
    parent.stop()
