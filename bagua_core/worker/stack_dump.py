"""Writes the stacks of all threads of a worker on request, even while one of them holds the GIL, and its collectives.

The worker's end of a channel that the agent made (bagua_agent/workers/process/stack_channel.py) and passed as two
descriptors: an anonymous file for answers, and a pipe for requests. A thread writes all stacks when a byte comes
through the pipe; faulthandler does the same, from C, on a real-time signal. Another byte asks the thread for the
collectives under way (collectives_answer.py). The first line of the file tells the agent the number of that signal and
the file's descriptor. Knows neither agent nor job; imports the standard library only, for it runs before torch.

The thread first: it holds the GIL while it writes, so nothing moves under it. From the signal no lock is taken, and a
thread that ends meanwhile would end the whole process with SIGSEGV; it is for a process whose GIL is not to be had,
where no thread of Python can end either.
Invariant: nothing that a script uses is taken: no low descriptor, no signal that has a handler already, and none that
the script keeps for itself.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from _thread import start_new_thread  # one that threading.enumerate() does not show to scripts
from collections.abc import Callable

DESCRIPTORS_VARIABLE = "BAGUA_STACK_FDS"  # "<file>,<pipe>"; empty once they are taken
LEAST_DESCRIPTOR = 200  # scripts count on low numbers being free
_RAISED_BY_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}  # of the thread itself
WHOLE = "\n-- whole\n"  # also in bagua_agent/workers/process/stack_channel.py
COLLECTIVES = b"c"  # the request for them, and how the answer begins: also there
COLLECTIVES_HEAD = "-- collectives\n"


def answer_stack_requests() -> int | None:
    """Begins to write all threads' stacks on request, at the latest by the signal that is returned; None if this system
    can't, or there is no channel.

    Forked children inherit the signal together with the file, but no thread. A stack dump is never worth failing a
    worker for.
    """
    given = os.environ.get(DESCRIPTORS_VARIABLE)
    if not given:
        return None
    os.environ[DESCRIPTORS_VARIABLE] = ""  # the descriptors mean nothing to children
    try:
        channel, requests = (_moved_up(int(number)) for number in given.split(","))
    except (OSError, ValueError):
        return None  # inherited from something that is no agent
    # From the top: the lowest real-time signals are the ones that libraries take.
    for number in range(signal.SIGRTMAX - 3, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            break
    else:
        os.close(channel)
        os.close(requests)
        return None
    faulthandler.register(number, file=channel, all_threads=True)
    _start_without_signals(_answer, (requests, channel), takes={number})
    os.write(channel, f"{number} {channel}\n".encode())
    return number


def _start_without_signals(run: Callable[..., None], arguments: tuple[int, ...], takes: set[int]) -> None:
    # What a script blocks in its only thread, to wait for it there, the kernel would else give to this one: most
    # signals end a process. A new thread inherits the mask of the one that starts it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _RAISED_BY_FAULTS - takes)
    try:
        start_new_thread(run, arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _answer(requests: int, channel: int) -> None:
    try:
        while request := os.read(requests, 1):
            if request == COLLECTIVES:
                os.write(channel, (COLLECTIVES_HEAD + _collectives() + WHOLE).encode())
                continue
            faulthandler.dump_traceback(channel, all_threads=True)
            os.write(channel, WHOLE.encode())
    except OSError:
        return  # a script that closes all descriptors has closed these too


def _collectives() -> str:
    """Returns the collectives under way as JSON. The module for it is found by this file's path: its package would
    bring torch in."""
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(os.path.dirname(_collectives.__code__.co_filename), "collectives_answer.py")
    try:
        spec = spec_from_file_location("_bagua_collectives_answer", path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return str(module.answer())
    except Exception as error:  # noqa: BLE001 (the agent gets it; the thread goes on answering)
        return f'{{"problem": "{type(error).__name__}"}}'


def _moved_up(low: int) -> int:
    try:
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR)
    except OSError:
        os.set_inheritable(low, False)
        return low  # fewer descriptors are allowed than that
    os.close(low)
    return high
