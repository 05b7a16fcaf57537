"""How much longer the same takes on this machine than where the bounds of tests were set.

Bounds of seconds in tests hold while the suite's own lanes run (scripts/test: two more than processors), on a processor
that adds half a million numbers in a loop in 10 ms. If other work shares the machine, or its processor is slower,
every process takes longer in proportion, and so do the bounds: a test does not depend on the machine's speed. A promise
that is broken still fails, later.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache

_LANES = (os.cpu_count() or 1) + 2
_SAMPLE_EVERY_S = 0.1
_KEPT = int(120 / _SAMPLE_EVERY_S)
_ADDITIONS, _ADDITIONS_S = 500_000, 0.0097


def load() -> float:
    """Processes that want to run now, as a multiple of what the suite's lanes are; at least 1."""
    with open("/proc/loadavg") as file:  # three means, then running/all
        running = int(file.read().split()[3].split("/")[0])
    return max(1.0, running / _LANES)


def crowding() -> float:
    """How many times longer the same takes now, by `load` and `slowness`; at least 1."""
    return load() * slowness()


@cache
def slowness() -> float:
    """How many times longer this processor takes for the same work; at least 1. By the thread's own time, so other work
    does not count."""
    return max(1.0, min(_additions_s() for _ in range(3)) / _ADDITIONS_S)


def _additions_s() -> float:
    total, began_s = 0, time.thread_time()
    for number in range(_ADDITIONS):
        total += number
    return time.thread_time() - began_s


class Deadline:
    """`limit_s` of a machine that is not busy, from now on. Time passes while `is_over` is called again and again."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_s = self._last_s = time.monotonic()
        self._passed_s = 0.0

    def is_over(self) -> bool:
        now_s = time.monotonic()
        self._passed_s += (now_s - self._last_s) / crowding()
        self._last_s = now_s
        return self._passed_s >= self._limit_s

    def __str__(self) -> str:
        took_s = self._last_s - self._began_s
        busy = (
            f" of a machine that is not busy ({took_s:.1f} s here)"
            if took_s > 1.5 * self._limit_s + 0.1
            else ""
        )
        return f"{self._limit_s:g} s{busy}"


class MachineLoad:
    """Samples `crowding` in a thread, from `start` to `stop`."""

    def __init__(self, measure: Callable[[], float] = crowding) -> None:
        self._measure = measure
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="machine-load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Has no effect the second time."""
        self._over.set()
        self._thread.join()

    def mean_since(self, since_s: float) -> float:
        """The mean crowding since a moment of time.monotonic(); 1 if nothing was sampled."""
        found = [value for at_s, value in list(self._samples) if at_s >= since_s]
        return sum(found) / len(found) if found else 1.0

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_EVERY_S):
            self._samples.append((time.monotonic(), self._measure()))
