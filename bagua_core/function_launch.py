"""Runs a function in the workers of a job on this machine: `bagua.launch`, for notebooks and sweeps.

Owns the exchange of function and results through a private directory, and the launcher's process: what it prints
appears in the caller's sys.stdout, an interrupt stops the job, and it ends when the caller's process dies. The launcher
is a program of its own, which the core does not import; the workers' side is worker/run_function.py.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from bagua_contract.environment import WorkerEnvironment
from bagua_core.errors import UserError

LEAVE_LIMIT_S = 60.0  # longer than the default of the launcher's own --shutdown-timeout
LEAVE_MARGIN_S = 30.0  # behind a longer one

# ends with the process that started it, also where that one is killed
_FOLLOW_AND_EXECUTE = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-m", "bagua_launch", *sys.argv[2:]])
"""


class LaunchFailed(UserError, RuntimeError):
    """The function raised in a worker, or the job could not start. The job's output has the cause."""


def launch(
    function: Callable[..., Any], *args: Any, nproc_per_node: int, options: Sequence[str] = (), **kwargs: Any
) -> list[Any]:
    """Runs `function(*args, **kwargs)` in `nproc_per_node` workers of an elastic job on this machine.

    The function may be defined in a notebook: it travels with what it refers to, and modules are looked for along the
    caller's sys.path. options: further ones of bagua-launch, such as ("--max-restarts", "3"). Returns what the function
    returned in each worker, by slot: the local rank, unless --virtual-local-rank makes that 0 in every worker. None
    where a worker ended by sys.exit(0). Blocks until the job ends; KeyboardInterrupt stops the job first.
    Raises LaunchFailed, TypeError, ValueError, ImportError (cloudpickle is missing).
    """
    if isinstance(nproc_per_node, bool) or not isinstance(nproc_per_node, int):
        raise TypeError(f"nproc_per_node={nproc_per_node!r} is not an integer")
    if nproc_per_node < 1:
        raise ValueError(f"nproc_per_node={nproc_per_node} must be at least 1")
    if WorkerEnvironment.is_present(os.environ):
        raise LaunchFailed(
            "bagua.launch() was called in a worker of a job; call it in a process of plain python"
        )
    with tempfile.TemporaryDirectory(prefix="bagua-launch-") as name:
        directory = Path(name)
        # first and by itself: a worker can unpickle the call only once it finds the caller's modules
        (directory / "sys_path").write_text(json.dumps(_module_path()))
        (directory / "call").write_bytes(_pickler().dumps((function, args, kwargs)))
        words = ["--standalone", "--nproc-per-node", str(nproc_per_node), *options]
        code = _run([*words, "-m", "bagua_core.worker.run_function", name])
        if code != 0:
            raise LaunchFailed(
                f"the job that ran {getattr(function, '__name__', function)!r} ended with exit code {code}; its output "
                "above has the first failure"
            )
        results = [directory / f"result-{slot}" for slot in range(nproc_per_node)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


def _module_path() -> list[str]:
    """Returns sys.path, with directories that are found from any other one. An entry that is no file belongs to an
    import hook."""

    def is_relative(entry: str) -> bool:
        return not entry or (not os.path.isabs(entry) and os.path.exists(entry))

    entries = [entry for entry in sys.path if isinstance(entry, str)]
    return [os.path.join(os.getcwd(), entry) if is_relative(entry) else entry for entry in entries]


def _pickler() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise ImportError(
            "bagua.launch() needs cloudpickle: pip install 'bagua-elastic[notebook]'"
        ) from error


def _run(words: list[str]) -> int:
    """Runs the launcher, and returns its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", _FOLLOW_AND_EXECUTE, str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a Ctrl-C in the terminal reaches it once, by the line below
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            _show(process.stdout)
            return process.wait()
        except KeyboardInterrupt:
            _stop(process, _show_while_possible, leave_limit_s(words))
            raise
        except BaseException:
            _stop(process, _discard, leave_limit_s(words))  # where the caller's sys.stdout may be gone
            raise


def _show(output: IO[str]) -> None:
    for line in output:
        sys.stdout.write(line)
        sys.stdout.flush()


def _show_while_possible(output: IO[str]) -> None:
    """Shows the output until sys.stdout fails, and discards the rest: the Ctrl-C that stops a job ends the `tee` of its
    output too, and the launcher must be able to go on printing."""
    try:
        _show(output)
    except (OSError, ValueError):  # ValueError: a closed file
        _discard(output)


def _discard(output: IO[str]) -> None:
    for _ in output:
        pass


def leave_limit_s(words: Sequence[str]) -> float:
    """Returns how long the launcher may take to end once it was interrupted, given its options. Pure."""
    joined = [word.partition("=") for word in words]
    given = [value for name, equals, value in joined if equals and _is_shutdown_timeout(name)]
    given += [value for name, value in itertools.pairwise(words) if _is_shutdown_timeout(name)]
    try:
        return max([LEAVE_LIMIT_S, *(float(value) + LEAVE_MARGIN_S for value in given)])
    except ValueError:  # no number: the launcher refuses it
        return LEAVE_LIMIT_S


def _is_shutdown_timeout(name: str) -> bool:
    return name.replace("_", "-") == "--shutdown-timeout"


def _stop(process: subprocess.Popen[str], read: Callable[[IO[str]], None], limit_s: float) -> None:
    """Stops the job as Ctrl-C does, and reads what it prints meanwhile. SIGKILL follows if that takes too long or is
    interrupted: the job's guardian then ends the workers."""
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    timer = threading.Timer(limit_s, _kill_late, (process, limit_s))
    timer.daemon = True
    timer.start()
    try:
        read(process.stdout)
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()


def _kill_late(process: subprocess.Popen[str], limit_s: float) -> None:
    process.kill()  # first: the print fails if standard error has ended too
    print(f"bagua: the job did not stop within {limit_s:g} s and is killed", file=sys.stderr)
