"""Tables: what an ending is called, and whose fault it is."""

from __future__ import annotations

import json
import signal

import pytest

from bagua_agent.workers.exit_cause import SUMMARY_CHARACTERS, ExitCause, exit_cause

TRACEBACK = (
    'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: boom\n'
)
RECORDED = json.dumps(
    {"message": {"message": "ValueError: boom", "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "1"}}}
)


def test_exit_code_zero() -> None:
    assert exit_cause(0, None, "some warning") == ExitCause(0, None, "exit code 0", "", False)


def test_recorded_exception() -> None:
    assert exit_cause(1, RECORDED, "other\n") == ExitCause(
        1, None, "ValueError: boom", TRACEBACK.rstrip(), True
    )


@pytest.mark.parametrize(
    ("error_file", "stderr", "summary"),
    [
        (None, "", "exit code 3"),
        (None, "just text: here\n", "exit code 3"),
        (None, TRACEBACK, "ValueError: boom"),
        (None, TRACEBACK + "[W] cleaning up: now\n", "ValueError: boom"),
        (None, '  File "t.py", line 1\n    x = (\n        ^\nSyntaxError: bad\n', "SyntaxError: bad"),
        (None, 'Traceback (most recent call last):\n  File "t"\na.b.CustomError\n', "a.b.CustomError"),
        ("{cut off", TRACEBACK, "ValueError: boom"),
        ("[]", "", "exit code 3"),
        ('{"message": "plain"}', "", "plain"),
        ('{"message": {"extraInfo": 3}}', "", "exit code 3"),
        ('{"message": {"message": "a\\nb"}}', "", "a"),
        ('{"message": {"message": "%s"}}' % ("x" * 999), "", "x" * (SUMMARY_CHARACTERS - 3) + "..."),
    ],
)
def test_summary_of_a_failure(error_file: str | None, stderr: str, summary: str) -> None:
    cause = exit_cause(3, error_file, stderr)
    assert (cause.summary, cause.script_failure, cause.signal_name) == (summary, True, None)


@pytest.mark.parametrize(
    ("number", "name", "failure"),
    [
        (signal.SIGKILL, "SIGKILL", False),
        (signal.SIGTERM, "SIGTERM", False),
        (signal.SIGINT, "SIGINT", False),
        (signal.SIGHUP, "SIGHUP", False),
        (signal.SIGSEGV, "SIGSEGV", True),
        (signal.SIGABRT, "SIGABRT", True),
        (signal.SIGBUS, "SIGBUS", True),
        (signal.SIGFPE, "SIGFPE", True),
        (signal.SIGILL, "SIGILL", True),
        (40, "signal 40", False),
    ],
)
def test_signals(number: int, name: str, failure: bool) -> None:
    assert exit_cause(-number, None, "tail\n") == ExitCause(
        -number, name, f"killed by {name}", "tail", failure
    )


def test_signal_after_an_exception() -> None:
    cause = exit_cause(-signal.SIGKILL, RECORDED)
    assert (cause.summary, cause.script_failure) == ("killed by SIGKILL after ValueError: boom", False)
    assert cause.traceback_tail.endswith("ValueError: boom")


def test_tail_is_bounded() -> None:
    assert len(exit_cause(1, None, "line\n" * 1000).traceback_tail.splitlines()) == 20
