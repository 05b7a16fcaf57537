"""Tables: the names of exits, and their causes."""

from __future__ import annotations

import json
import signal

import pytest

from bagua_agent.workers.exits.exit_cause import SUMMARY_CHARACTERS, ExitCause, exit_cause
from bagua_contract import membership_pb2 as pb

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


ABORTED = "terminate called without an active exception\n"


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (TRACEBACK + ABORTED, (1, "ValueError: boom", None)),
        (
            "[rank0]: " + TRACEBACK.rstrip().replace("\n", "\n[rank0]: ") + "\n\n" + ABORTED,
            (1, "ValueError: boom", None),
        ),
        (ABORTED, (-6, "killed by SIGABRT", "SIGABRT")),
        ("loss: 0.5\n" + ABORTED, (-6, "killed by SIGABRT", "SIGABRT")),
        (TRACEBACK + "went on: yes\n" + ABORTED, (-6, "killed by SIGABRT", "SIGABRT")),
        (TRACEBACK, (-6, "killed by SIGABRT", "SIGABRT")),
    ],
)
def test_an_abort_behind_an_exception_that_nothing_caught(
    stderr: str, expected: tuple[int, str, str | None]
) -> None:
    """torch's threads abort some interpreters on their way out; the exception is what ended the script."""
    cause = exit_cause(-signal.SIGABRT, None, stderr)
    assert (cause.exit_code, cause.summary, cause.signal_name) == expected
    assert cause.script_failure
    killed = exit_cause(-signal.SIGABRT, None, stderr, killed_for="it hung")
    assert (killed.exit_code, killed.script_failure) == (-signal.SIGABRT, False)


def test_tail_is_bounded() -> None:
    assert len(exit_cause(1, None, "line\n" * 1000).traceback_tail.splitlines()) == 20


def test_prefix_that_torch_distributed_puts_before_lines() -> None:
    prefixed = "".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines())
    cause = exit_cause(1, None, prefixed)
    assert (cause.summary, cause.traceback_tail) == ("ValueError: boom", TRACEBACK.rstrip())


def test_exception_of_cpp_is_named_and_its_native_frames_are_left_out() -> None:
    frames = "".join(f"frame #{n}: c10::Error::Error() + 0x9c (0x7f in libc10.so)\n" for n in range(40))
    stderr = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [Rank 3] Watchdog caught collective operation timeout\n"
        f"Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632\n{frames}<omitting python frames>\n"
    )
    cause = exit_cause(-signal.SIGABRT, None, stderr)
    assert cause.summary == (
        "killed by SIGABRT after c10::DistBackendError: [Rank 3] Watchdog caught collective operation timeout"
    )
    assert cause.traceback_tail == "\n".join(stderr.splitlines()[:3])


def test_what_the_agent_killed_is_no_failure_of_the_script() -> None:
    cause = exit_cause(-signal.SIGKILL, None, "", killed_for="hung: 640 s outside the step's collectives")
    assert (cause.summary, cause.script_failure) == (
        "hung: 640 s outside the step's collectives (killed by SIGKILL)",
        False,
    )
    # it ended by itself before the agent came to it
    assert exit_cause(1, RECORDED, killed_for="hung").summary == "ValueError: boom"


@pytest.mark.parametrize("half", ["\ud83d", "\udc00", "\ud83d\ud83d"])
def test_half_a_character_fits_into_a_record(half: str) -> None:
    message = {"message": f"boom {half}", "extraInfo": {"py_callstack": f"line 1\nValueError: {half}"}}
    cause = exit_cause(1, json.dumps({"message": message}))
    record = pb.Failure(cause=cause.summary, traceback_tail=cause.traceback_tail)
    assert record.cause == f"boom {half}".encode("utf-8", "backslashreplace").decode()
    assert record.traceback_tail.endswith("\\ud83d") or "\\udc00" in record.traceback_tail
