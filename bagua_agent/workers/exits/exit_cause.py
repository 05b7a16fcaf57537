"""Finds why a worker ended, from its return code, error file and the tail of stderr. Pure.

Owns the rule which endings are the script's fault and draw on the budget of restarts.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass

from bagua_agent.base.plain_text import in_utf8

SUMMARY_CHARACTERS = 300
TAIL_LINES = 20
TAIL_LINE_CHARACTERS = 2048  # a record in the store has room for the whole tail

# Signals that a program brings on itself; all others come from outside.
FAULT_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})

# The last line of a traceback: a dotted name, then perhaps a colon and text.
_EXCEPTION_LINE = re.compile(r"^([A-Za-z_][\w.]*)(: .*)?$")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch.distributed puts it before uncaught ones
_NATIVE_FRAME = re.compile(r"^\s*(frame #\d+: |<omitting python frames>)")
# What the C++ runtime prints before it aborts
_TERMINATED = re.compile(r"terminate called after throwing an instance of '([^']+)'\s+what\(\): *(.*)")

_ABORTED = "terminate called without an active exception"


@dataclass(frozen=True, slots=True)
class ExitCause:
    """The cause of a worker's end. exit_code: negative for the number of a signal; 1 where an exception came before an
    abort on the way out. summary: one line for a person."""

    exit_code: int
    signal_name: str | None
    summary: str
    traceback_tail: str
    script_failure: bool


def exit_cause(
    returncode: int,
    error_file_text: str | None = None,
    stderr_tail: str = "",
    killed_for: str = "",
    out_of_memory: str = "",
) -> ExitCause:
    """Returns the cause of a worker's end. Never raises.

    error_file_text: content of error.json, None if there is none. killed_for: why the agent itself killed it, so that
    its signal is not taken for another's. out_of_memory: the kernel's record of it.
    """
    message, callstack = _recorded(error_file_text)
    stderr_tail = _RANK_PREFIX.sub("", stderr_tail)
    if returncode == -signal.SIGABRT and not killed_for and _aborted_on_its_way_out(stderr_tail):
        returncode = 1
    name = signal_name(returncode)
    if returncode == 0:
        return ExitCause(0, None, "exit code 0", "", False)
    if name is not None and killed_for:
        summary, failure = f"{killed_for} (killed by {name})", False
    elif name is not None:
        message = message or _terminated_by(stderr_tail)
        summary = f"killed by {name}" + (f" after {message}" if message else "")
        if out_of_memory:
            summary = f"killed by {name}, out of memory: {out_of_memory}"
        failure = -returncode in FAULT_SIGNALS
    else:
        message = message or _exception_in(stderr_tail)
        summary = message or f"exit code {returncode}"
        failure = True
    tail = _last_lines(callstack or stderr_tail)
    # JSON can name half a character
    return ExitCause(returncode, name, in_utf8(_one_line(summary)), in_utf8(tail), failure)


def shell_exit_code(returncode: int) -> int:
    """Returns the exit code that a shell would show: 128 plus the number of the signal that ended the process."""
    return returncode if returncode >= 0 else 128 - returncode


def signal_name(returncode: int) -> str | None:
    """Returns the name of the signal that a negative return code means; None if it is not negative."""
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"  # a real-time signal has no name


def _recorded(text: str | None) -> tuple[str, str]:
    """Returns the message and traceback of an error file; empty for missing parts. The file is untrusted."""
    if not text:
        return "", ""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""  # cut off, since the worker died while writing; or no error file at all
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return message, ""
    if not isinstance(message, dict):
        return "", ""
    extra = message.get("extraInfo")
    callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text_of = message.get("message")
    return text_of if isinstance(text_of, str) else "", callstack if isinstance(callstack, str) else ""


def _exception_in(stderr_tail: str) -> str:
    """Returns the exception line of the last traceback in the tail; empty if there is none."""
    lines = stderr_tail.splitlines()
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith(("Traceback (most recent call last)", '  File "')):
            for line in lines[start + 1 :]:
                if _EXCEPTION_LINE.match(line):
                    return line
            return ""
    return ""


def _terminated_by(stderr_tail: str) -> str:
    """Returns the C++ exception that nothing caught; empty if there is none."""
    found = _TERMINATED.search(stderr_tail)
    return f"{found[1]}: {found[2].strip()}" if found else ""


def _aborted_on_its_way_out(stderr_tail: str) -> bool:
    """Tells whether an exception that nothing caught is followed by an abort alone. C++ threads, such as those of
    torch's process group, that still run when the interpreter ends cause it. Python would have ended with 1, and
    sometimes does."""
    lines = [line for line in stderr_tail.splitlines() if line.strip()]
    return lines[-1:] == [_ABORTED] and lines[-2:-1] == [_exception_in("\n".join(lines[:-1]))]


def _last_lines(text: str) -> str:
    """Returns the last lines of the text without native frames: thirty of them would push the exception itself out of
    sight."""
    kept = [line for line in text.rstrip().splitlines() if not _NATIVE_FRAME.match(line)]
    return "\n".join(line[:TAIL_LINE_CHARACTERS] for line in kept[-TAIL_LINES:])


def _one_line(text: str) -> str:
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= SUMMARY_CHARACTERS else line[: SUMMARY_CHARACTERS - 3] + "..."
