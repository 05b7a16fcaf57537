"""Adds the cache's hit rate to the job's progress reports, about once per second, in the worker that made the data set.

Samples are read in a loader's processes, which have no session; their counts are in the shared counters, and this
thread puts the share of hits since it last looked among the numbers that the engine reports. Only under an agent.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

from bagua_contract.environment import WorkerEnvironment
from bagua_core.elastic.step import runtime

EVERY_S = 1.0


class Counting(Protocol):
    """What is reported on: a CacheLoader."""

    def counts(self) -> Mapping[str, int] | None:
        """Returns the counts of hits and misses, to any thread; None while it is closed."""


def metric_name(dataset_name: str) -> str:
    return f"{dataset_name}_hit_rate" if dataset_name else "cache_hit_rate"


def recent_rate(before: tuple[int, int], now: tuple[int, int]) -> float | None:
    """Returns the share of hits between two counts of (hits, misses); None if nothing was read."""
    hits, misses = now[0] - before[0], now[1] - before[1]
    return hits / (hits + misses) if hits + misses > 0 else None


class HitMetrics:
    """Reports the hit rate of one loader from a thread. loader None: in a child process, which reports nothing."""

    def __init__(self, loader: Counting | None, dataset_name: str) -> None:
        self._closed = threading.Event()
        if loader is None or not WorkerEnvironment.is_present(os.environ):
            return
        threading.Thread(
            target=_report,
            args=(weakref.ref(loader), metric_name(dataset_name), self._closed),
            name="bagua-cache-metrics",
            daemon=True,
        ).start()

    def close(self) -> None:
        self._closed.set()


def _report(loader: weakref.ref[Counting], name: str, closed: threading.Event) -> None:
    before = (0, 0)
    while not closed.wait(EVERY_S):
        alive = loader()
        if alive is None:
            return
        counts = alive.counts()
        del alive  # or it would live for another second because of this thread
        engine = runtime._engine  # the script's; this thread must not be the one that joins the job
        if engine is None or counts is None:
            continue
        now = (counts["hits"], counts["misses"])
        rate = recent_rate(before, now)
        if rate is not None:
            engine.metrics[name] = rate
            before = now
