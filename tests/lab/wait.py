"""Waiting for a condition with a deadline: the only waiting that tests do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

from tests.lab.machine_load import Deadline

T = TypeVar("T")
HANG_S = 300.0
"""A process that a test started and that has not ended by then hangs. It bounds a test and measures nothing: on a busy
machine an interpreter that imports torch can take a minute."""


def eventually(
    predicate: Callable[[], T | None],
    deadline_s: float,
    why: str | Callable[[], str],
    interval_s: float = 0.01,
) -> T:
    """The first true value of `predicate`.

    Raises AssertionError with `why` (called only then) and the last value when `deadline_s` has passed. While other
    work than the suite's shares the machine, time passes more slowly (machine_load.py).
    An exception of the predicate is the test's own and comes through. A dear predicate is called less often than
    every interval_s: at most a fourth of a processor goes into it.
    """
    deadline = Deadline(deadline_s)
    while True:
        used = time.thread_time()
        value = predicate()
        if value:
            return value
        if deadline.is_over():
            reason = why if isinstance(why, str) else why()
            raise AssertionError(f"not within {deadline}: {reason} (last value: {value!r})")
        time.sleep(max(interval_s, 3 * (time.thread_time() - used)))


def patiently(wait: Callable[[float], T], limit_s: float) -> T:
    """The result of `wait(seconds)`, a wait for a process that raises subprocess.TimeoutExpired and can be repeated.

    Raises that when `limit_s` of a machine that is not busy has passed.
    """
    deadline = Deadline(limit_s)
    while True:
        try:
            return wait(min(1.0, limit_s))
        except subprocess.TimeoutExpired:
            if deadline.is_over():
                raise
