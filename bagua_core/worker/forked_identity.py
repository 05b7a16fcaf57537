"""Makes a forked worker look like a process that was started for it alone.

Its streams, environment, directory, processors, random state and secrets, and what `ps` and /proc show.
Signals, limits and flags need nothing: the warm parent never changed what it was started with. Only
PYTHONHASHSEED's effect is shared by the workers of a node. Knows nothing of why the fork was made.

Loaded by path (warm_parent.py), so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from typing import Any

GATE_VARIABLE = "BAGUA_GATE_FD"
STACKS_VARIABLE = "BAGUA_STACK_FDS"
PR_SET_MM, PR_SET_MM_MAP = 35, 14
NO_FILE = 0xFFFFFFFF
MEMORY_FIELDS = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
)


def put_on(request: dict[str, Any], descriptors: list[int], printed: tuple[bytes, bytes], name: str) -> None:
    """Makes this process look like the worker of `request`: env, cwd, cpus (a list, or null), line (the command line to
    show).

    descriptors: for stdin, stdout, stderr, the gate, and both of the stack channel; the first three are closed.
    """
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    gate = descriptors[3]
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ[GATE_VARIABLE] = str(gate)
    os.environ[STACKS_VARIABLE] = ",".join(map(str, descriptors[4:]))
    os.set_inheritable(gate, True)  # as in a spawned worker; closed when the gate opens
    os.chdir(request["cwd"])
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])
    _renew_streams()
    _renew_randomness()
    exchange_name(name)
    _show(request["line"], request["env"])
    for number, text in zip((1, 2), printed, strict=True):
        while text:
            text = text[os.write(number, text) :]


def _renew_streams() -> None:
    """Makes sys.stdin, stdout and stderr as the interpreter makes them, from what the descriptors are now.

    The same text objects stay, because imported modules hold them (logging's handlers do).
    """
    streams: list[Any] = [sys.stdin, sys.stdout, sys.stderr]
    for number, (stream, mode) in enumerate(zip(streams, ("r", "w", "w"), strict=True)):
        if stream is None:
            continue
        name = stream.name
        raw: Any = io.FileIO(number, mode, closefd=False)
        raw.name = name
        stream.__init__(
            io.BufferedReader(raw) if mode == "r" else raw,  # output unbuffered, as -u has it
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        stream.mode = mode


def _renew_randomness() -> None:
    """Renews the state that an import draws from the system; `random` sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch_random = sys.modules.get("torch.random")
    if torch_random is not None:
        torch_random.default_generator.seed()  # the CPU's; a GPU's is made when CUDA starts
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def exchange_name(name: str) -> str:
    """Gives the process another name for `ps -o comm`; returns the old one."""
    with open("/proc/self/comm", "r+") as file:
        old = file.read().rstrip("\n")
        file.seek(0)
        file.write(name)
    return old


class _MemoryMap(ctypes.Structure):
    """The structure prctl_mm_map of linux/prctl.h."""

    _fields_ = [
        *((field, ctypes.c_uint64) for field in MEMORY_FIELDS),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_shown: list[ctypes.Array[ctypes.c_char]] = []  # /proc points into them as long as the process lives


def _show(line: list[str], environment: dict[str, str]) -> None:
    """Points /proc's cmdline and environ to this worker's own. Where the kernel refuses, the parent's are shown."""
    arguments = b"".join(os.fsencode(word) + b"\0" for word in line)
    variables = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in environment.items())
    texts = [ctypes.create_string_buffer(text, max(len(text), 1)) for text in (arguments, variables)]
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    of = {number: int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47)}  # as proc(5) numbers them
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    starts = [ctypes.addressof(text) for text in texts]
    memory = _MemoryMap(
        start_code=of[26], end_code=of[27], start_data=of[45], end_data=of[46], start_brk=of[47],
        start_stack=of[28], arg_start=starts[0], arg_end=starts[0] + len(arguments),
        env_start=starts[1], env_end=starts[1] + len(variables), exe_fd=NO_FILE,
    )  # fmt: skip
    memory.brk = libc.sbrk(0)
    if (
        libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(memory), ctypes.c_ulong(ctypes.sizeof(memory)), 0)
        == 0
    ):
        _shown.extend(texts)
