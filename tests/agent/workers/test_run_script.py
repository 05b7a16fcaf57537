"""A script under the runner must not be able to tell: compared with the interpreter itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from bagua_agent.config.job_config import CommandKind
from bagua_agent.workers.start import worker_command
from tests.agent.workers.worker_lab import EndedProcess, Workers, is_running, wait_until
from tests.lab.wait import HANG_S

IDENTITY = """
import sys, os
print(sys.argv, sys.path, __file__, __name__, __spec__ and __spec__.name, __package__)
print(__loader__.__class__.__name__, sorted(globals()), type(__builtins__).__name__)
print(sys.modules["__main__"].__dict__ is globals(), sys.orig_argv[2:])
"""

FAILURES = {
    "deep": "def f(n):\n    return 1 / n if n == 0 else f(n - 1)\nf(3)\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('outer') from e\n",
    "syntax": "x = (\n",
    "in import": "import json\njson.loads('{')\n",
    "group": "raise ExceptionGroup('g', [ValueError(1), KeyError('k')])\n",
    "note": "e = ValueError('x')\ne.add_note('note')\nraise e\n",
    "own hook": "import sys\nsys.excepthook = lambda t, e, b: print('hook', t, b.tb_lineno)\n1 / 0\n",
    "broken hook": "import sys\ndef hook(*a):\n    raise KeyError('h')\nsys.excepthook = hook\n1 / 0\n",
    "exiting hook": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n1 / 0\n",
    "exit 3": "import sys\nsys.exit(3)\n",
    "exit None": "import sys\nsys.exit()\n",
    "exit text": "import sys\nsys.exit('what went wrong')\n",
    "exit 256": "import sys\nsys.exit(256)\n",
    "exit -1": "import sys\nsys.exit(-1)\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "abort": "import os\nos.abort()\n",
    "atexit": "import atexit\natexit.register(print, 'at exit')\nraise ValueError('x')\n",
    "thread": "import threading as t, time\nt.Thread(target=lambda: (time.sleep(0.1), print('t'))).start()\n",
    "latin": "# -*- coding: latin-1 -*-\nprint('caf\u00e9'.encode('utf-8'))\n",
    "last": "import sys, atexit\natexit.register(lambda: print(sys.last_type, sys.last_value))\n1 / 0\n",
    "cycle in main": "class A:\n    def __del__(self):\n        print('deleted')\na = A()\na.me = a\n",
}


def plain(workers: Workers, *arguments: str) -> EndedProcess:
    done = subprocess.run(
        [sys.executable, "-u", *arguments],
        cwd=workers.directory,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return EndedProcess(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("target", ["script.py", "./script.py", "sub/../script.py", "link.py"])
def test_script_sees_the_same_interpreter(workers: Workers, target: str) -> None:
    workers.script(IDENTITY, "real/script.py")
    (workers.directory / "sub").mkdir()
    (workers.directory / "script.py").write_text(IDENTITY)
    (workers.directory / "link.py").symlink_to("real/script.py")
    ended = workers.to_end(workers.start(target, "a", "--b", "-c"))
    assert ended == plain(workers, target, "a", "--b", "-c")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", FAILURES)
def test_ends_as_under_the_interpreter(workers: Workers, name: str) -> None:
    workers.script(FAILURES[name])
    assert workers.to_end(workers.start("script.py")) == plain(workers, "script.py")


def test_module_package_directory_and_zip(workers: Workers) -> None:
    workers.script(IDENTITY + "1 / 0\n", "package/__main__.py")
    workers.script("", "package/__init__.py")
    workers.script(IDENTITY, "package/part.py")
    workers.script(IDENTITY, "application/__main__.py")
    with zipfile.ZipFile(workers.directory / "app.zip", "w") as archive:
        archive.writestr("__main__.py", IDENTITY)
    for module in ("package", "package.part", "package.missing", "missing"):
        under_runner = workers.to_end(workers.start(module, "x", kind=CommandKind.MODULE))
        assert under_runner == plain(workers, "-m", module, "x")
    for target in ("application", "app.zip"):
        assert workers.to_end(workers.start(target, "x")) == plain(workers, target, "x")


def test_run_path(workers: Workers) -> None:
    source = "import sys\nprint(__name__, __file__, sys.argv)\n"
    workers.script(source)
    ended = workers.to_end(workers.start("script.py", "x", kind=CommandKind.RUN_PATH))
    assert (ended.returncode, ended.stdout) == (0, "__main__ script.py ['script.py', 'x']\n")


def test_classes_of_the_script_can_be_pickled(workers: Workers) -> None:
    source = """
import pickle, inspect, __main__
class Point:
    def __init__(self, x): self.x = x
assert pickle.loads(pickle.dumps(Point(3))).x == 3
assert __main__.Point is Point
print(inspect.getsource(Point.__init__).strip())
"""
    ended = workers.run_source(source)
    assert (ended.returncode, ended.stdout) == (0, "def __init__(self, x): self.x = x\n"), ended.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(workers: Workers, method: str) -> None:
    source = f"""
import multiprocessing
class Job:
    def __init__(self, n): self.n = n
def work(job): return Job(job.n * 2)
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        print([j.n for j in pool.map(work, [Job(1), Job(2)])])
"""
    ended = workers.run_source(source)
    assert (ended.returncode, ended.stdout) == (0, "[2, 4]\n"), ended.stderr


def test_fork_without_a_main_guard_and_a_child_that_returns(workers: Workers, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    source = """
import multiprocessing, os, sys, types
runtime = types.ModuleType("bagua_core.elastic.step.runtime")
runtime.shutdown = lambda code: print("shutdown", code)
sys.modules["bagua_core.elastic.step.runtime"] = runtime
def work(): print("child")
p = multiprocessing.get_context("fork").Process(target=work)
p.start(); p.join()
if os.fork() == 0:
    raise ValueError("in the child")
print("child ended", os.waitstatus_to_exitcode(os.wait()[1]))
"""
    ended = workers.run_source(source, env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert (ended.returncode, ended.stdout) == (0, "child\nchild ended 1\nshutdown 0\n"), ended.stderr
    assert "ValueError: in the child" in ended.stderr
    assert not error_file.exists()


def test_error_file_is_what_torch_reads(workers: Workers, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    ended = workers.run_source("def f():\n    raise ValueError('boom')\nf()\n", env=env)
    assert ended.returncode == 1
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert message["extraInfo"]["py_callstack"] == ended.stderr
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_error_file_of_record_is_kept(workers: Workers, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    source = "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('by @record')\n1 / 0\n"
    workers.run_source(source, env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert error_file.read_text() == "by @record"


@pytest.mark.parametrize("code", ["", "sys.exit(7)", "sys.exit('text')", "raise ValueError('x')"])
@pytest.mark.parametrize("hard", [False, True])
def test_shutdown_hook(workers: Workers, code: str, hard: bool) -> None:
    source = f"""
import atexit, sys, types
runtime = types.ModuleType("bagua_core.elastic.step.runtime")
def shutdown(exit_code):
    print("shutdown", exit_code)
    return {hard}
runtime.shutdown, runtime.script_failed = shutdown, lambda error: print("failed by", repr(error))
sys.modules["bagua_core.elastic.step.runtime"] = runtime
atexit.register(print, "at exit")
class Unfreed:
    def __del__(self): print("freed")
runtime.held = Unfreed()
{code}
"""
    ended = workers.run_source(source)
    expected = {"": 0, "sys.exit(7)": 7}.get(code, 1)
    assert ended.returncode == expected
    failed = "failed by ValueError('x')\n" if code.startswith("raise") else ""
    assert ended.stdout == f"{failed}shutdown {expected}\nat exit\n" + ("" if hard else "freed\n")
    assert ("text" in ended.stderr) == (code == "sys.exit('text')")


ENDS_HARD_SOON = """
import atexit, sys, threading, types
class Lines:
    def write(self, text):
        stderr.write(text)
        if "bagua: " in text:
            said.set()
    def flush(self): stderr.flush()
stderr, sys.stderr, said = sys.stderr, Lines(), threading.Event()
def shutdown(exit_code):
    sys._getframe(1).f_globals["HARD_EXIT_GRACE_S"] = 0.1
    return True
runtime = types.ModuleType("bagua_core.elastic.step.runtime")
runtime.shutdown = shutdown
sys.modules["bagua_core.elastic.step.runtime"] = runtime
def write():
    said.wait()
    print("written")
"""


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ("threading.Thread(target=write, name='uploader').start()", "threads uploader"),
        ("from concurrent.futures import *; ThreadPoolExecutor(1, 'saver').submit(write)", "threads saver_0"),
        ("atexit.register(write)", "atexit functions"),
    ],
)
def test_a_script_that_succeeds_is_waited_for_and_says_for_what(
    workers: Workers, waits: str, named: str
) -> None:
    """Its last file is written after the last line, as under the interpreter."""
    ended = workers.run_source(f"{ENDS_HARD_SOON}{waits}\n")
    assert (ended.returncode, ended.stdout) == (0, "written\n"), ended.stderr
    assert ended.stderr == f"bagua: the script has ended; its process waits for its {named}\n"


def test_an_interrupt_at_the_end_ends_the_wait_for_threads_alone(workers: Workers) -> None:
    source = """
import os, signal
def interrupt():
    said.wait()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
atexit.register(print, "at exit")
threading.Thread(target=interrupt, name='uploader').start()
"""
    ended = workers.run_source(ENDS_HARD_SOON + source)
    assert (ended.returncode, ended.stdout) == (0, "at exit\n"), ended.stderr


def test_a_script_that_fails_is_not_waited_for_and_says_what_is_cut(workers: Workers) -> None:
    source = "threading.Thread(target=threading.Event().wait, name='saver').start()\nsys.exit(7)\n"
    ended = workers.run_source(ENDS_HARD_SOON + source)
    assert (ended.returncode, ended.stdout) == (7, "")
    line = "the process ends with exit code 7 and does not wait longer for its threads saver"
    assert ended.stderr == f"bagua: {line}\n"


@pytest.mark.parametrize("raised", ["LeaveInterrupt()", "KeyboardInterrupt()"])
def test_a_worker_that_left_after_an_interrupt_is_waited_for(workers: Workers, raised: str) -> None:
    """The agent ends it at the shutdown timeout."""
    source = f"""
import time
class LeaveInterrupt(KeyboardInterrupt):
    bagua_is_orderly = True
runtime.has_left = lambda: True
def write_late():
    said.wait()
    time.sleep(2.0)  # longer than a script that failed has
    print("written")
threading.Thread(target=write_late, name='uploader').start()
raise {raised}
"""
    ended = workers.run_source(ENDS_HARD_SOON + source)
    assert (ended.returncode, ended.stdout) == (130, "written\n"), ended.stderr
    assert ended.stderr == "bagua: the script has ended; its process waits for its threads uploader\n"


def test_shutdown_that_fails_is_reported(workers: Workers) -> None:
    source = """
import sys, types
runtime = types.ModuleType("bagua_core.elastic.step.runtime")
def shutdown(exit_code): raise RuntimeError("shutdown failed")
runtime.shutdown, runtime.script_failed = shutdown, lambda error: print("failed by", repr(error))
sys.modules["bagua_core.elastic.step.runtime"] = runtime
"""
    ended = workers.run_source(source)
    assert ended.returncode == 1
    assert ended.stderr.endswith("RuntimeError: shutdown failed\n")


@pytest.mark.parametrize(
    ("raised", "code", "reported"),
    [
        ("SystemExit(0)", 0, ""),
        ("LeaveInterrupt()", 130, ""),
        ("KeyboardInterrupt()", 130, "KeyboardInterrupt\n"),
    ],
)
def test_a_worker_that_leaves_in_shutdown_is_shut_down_again_and_ends_hard(
    workers: Workers, raised: str, code: int, reported: str
) -> None:
    """What shutdown has not closed yet may block the interpreter's own end."""
    source = f"""
import atexit, sys, types
runtime = types.ModuleType("bagua_core.elastic.step.runtime")
class LeaveInterrupt(KeyboardInterrupt):
    bagua_is_orderly = True
def shutdown(exit_code):
    print("shutdown", exit_code)
    runtime.calls += 1
    if runtime.calls == 1:
        raise {raised}
    return True
runtime.calls, runtime.shutdown, runtime.has_left = 0, shutdown, lambda: False
sys.modules["bagua_core.elastic.step.runtime"] = runtime
atexit.register(print, "at exit")
class Unfreed:
    def __del__(self): print("freed")
runtime.held = Unfreed()
"""
    ended = workers.run_source(source)
    assert (ended.returncode, ended.stdout) == (code, f"shutdown 0\nshutdown {code}\nat exit\n"), ended.stderr
    assert ended.stderr.endswith(reported) and bool(ended.stderr) == bool(reported)


def test_gate_holds_the_script(workers: Workers) -> None:
    workers.script("import os\nprint('ran', os.environ['BAGUA_GATE_FD'])\n")
    worker = workers.start("script.py", gated=True, preimport=("json",))
    assert worker.reap() is None
    assert worker.open_gate()
    assert not worker.open_gate()
    assert workers.to_end(worker) == EndedProcess(0, "ran -1\n", "")


def test_gate_refused_ends_quietly(workers: Workers) -> None:
    workers.script("print('ran')\n")
    worker = workers.start("script.py", gated=True)
    assert worker.refuse_gate()
    assert workers.to_end(worker) == EndedProcess(0, "", "")


def test_gate_opened_after_the_worker_died(workers: Workers) -> None:
    workers.script("print('ran')\n")
    worker = workers.start("script.py", gated=True)
    worker.signal_group(signal.SIGKILL)
    wait_until(lambda: worker.reap() is not None, "reaped")
    assert not worker.open_gate()
    assert worker.returncode == -signal.SIGKILL


def test_worker_dies_with_the_thread_that_started_it(workers: Workers) -> None:
    # what "the agent died" is to the kernel; the whole agent is killed in test_guardian.py
    workers.script("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    may_end = threading.Event()

    def spawner() -> None:
        workers.start("script.py")
        may_end.wait(20)

    thread = threading.Thread(target=spawner)
    thread.start()
    wait_until(lambda: workers.started, "started")
    pid = int(workers.read_line(workers.started[0]))
    assert is_running(pid)
    may_end.set()
    thread.join()
    wait_until(lambda: not is_running(pid), "worker gone")


def test_missing_script_under_the_runner(tmp_path: Path) -> None:
    runner = worker_command._script_runner()
    command = [sys.executable, str(runner), "missing.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 2
    assert "can't open file" in done.stderr and "missing.py" in done.stderr


@pytest.mark.parametrize("options", [(), ("--run-path",)])
@pytest.mark.parametrize("target", ["fifo", "/dev/zero"])
def test_what_is_no_file_is_neither_waited_for_nor_read(
    tmp_path: Path, target: str, options: tuple[str, ...]
) -> None:
    """The agent refuses it first; it may have become one since."""
    os.mkfifo(tmp_path / "fifo")
    runner = worker_command._script_runner()
    command = [sys.executable, str(runner), *options, target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode != 0
    assert "it is no ordinary file" in done.stderr and target in done.stderr


def test_the_agent_forks_quickly(workers: Workers) -> None:
    workers.script("")
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        workers.start("script.py", gated=True)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.02, times
