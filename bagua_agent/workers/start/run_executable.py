"""The process of a `--no-python` worker before it becomes the user's executable.

Run by path as `python -I -S -E run_executable.py PARENT_PID EXECUTABLE ARGUMENTS...`: ties its life to
the agent's, waits at the gate, then replaces itself. A program of its own rather than Popen's
preexec_fn, which would fork the agent (and its gRPC threads) instead of using vfork.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells say it


def main(parent_pid: int, command: list[str]) -> NoReturn:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(0)
    gate = int(os.environ.pop("BAGUA_GATE_FD", "-1"))
    if gate >= 0:
        word = os.read(gate, 1)
        os.close(gate)
        if word != b"g":
            os._exit(0)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; the executable must not
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"bagua: cannot run {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
