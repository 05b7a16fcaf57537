"""Simulates the steps of one job: computation, readiness of buckets, the algorithm's exchange, the vote, the optimizer.

The plan of buckets is the runtime's own (plan_buckets).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bagua_core.algorithms.async_model_average import DEFAULT_INTERVAL_MS
from bagua_core.algorithms.local_sgd import DEFAULT_SYNC_EVERY
from bagua_core.algorithms.streaming_diloco import DEFAULT_DELAY, DEFAULT_FRAGMENTS
from bagua_core.algorithms.streaming_diloco import DEFAULT_SYNC_EVERY as DILOCO_SYNC_EVERY
from bagua_core.communication.reduction.buckets import (
    DEFAULT_BUCKET_CAP_MB,
    FIRST_BUCKET_BYTES,
    BucketPlan,
    carries_tail,
    plan_buckets,
)
from bagua_core.communication.weights.fragment_schedule import Schedule
from benchmarks.scaling.hardware import Cluster, Transport
from benchmarks.scaling.models import Model
from benchmarks.scaling.steps import exchanges
from benchmarks.scaling.steps.background import AsyncAverage, StreamingDiLoCo
from benchmarks.scaling.steps.exchanges import Exchange
from benchmarks.scaling.steps.timeline import vote_s
from benchmarks.scaling.steps.workers import Workers

FORWARD_SHARE = 1 / 3  # of a step's computation: backward has the gradients of weights and of activations
_IN_BACKWARD = 2 / 3  # of what a step costs for each byte of gradients; the rest is the optimizer's
WARM_UP = 2
STEPS = 6


@dataclass(frozen=True, slots=True)
class Workload:
    """compute_s: of a worker's forward and backward in a step. bucket_cap_bytes: as of the runtime's option."""

    model: Model
    compute_s: float
    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_MB * 1024 * 1024
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    sync_every: int = DEFAULT_SYNC_EVERY
    diloco_every: int = DILOCO_SYNC_EVERY
    async_interval_s: float = DEFAULT_INTERVAL_MS / 1000
    forward_share: float = FORWARD_SHARE

    def buckets(self) -> tuple[BucketPlan, ...]:
        return plan_buckets(self.model.specs(), self.bucket_cap_bytes, self.first_bucket_bytes)


Make = Callable[[Workers, tuple[BucketPlan, ...], Workload], Exchange]


def _streaming(workers: Workers, buckets: tuple[BucketPlan, ...], load: Workload) -> Exchange:
    sizes = [spec.elements for spec in load.model.specs()]
    schedule = Schedule(load.diloco_every, min(DEFAULT_FRAGMENTS, len(sizes)), DEFAULT_DELAY)
    return StreamingDiLoCo(workers, buckets, sizes, schedule)


ALGORITHMS: dict[str, Make] = {
    "ddp": lambda w, b, _: exchanges.Allreduce(w, b),
    "ddp_fp16": lambda w, b, _: exchanges.Allreduce(w, b, share=0.5),
    "gradient_allreduce": lambda w, b, _: exchanges.Allreduce(w, b),
    "bytegrad": lambda w, b, _: exchanges.bytegrad(w, b),
    "qadam_8bit": lambda w, b, _: exchanges.qadam_8bit(w, b),
    "qadam_1bit": lambda w, b, _: exchanges.qadam_1bit(w, b),
    "decentralized": lambda w, b, _: exchanges.Decentralized(w, b, in_pairs=False),
    "decentralized_shift_one": lambda w, b, _: exchanges.Decentralized(w, b, in_pairs=True),
    "low_precision_decentralized": lambda w, b, _: exchanges.LowPrecisionRing(w, b),
    "local_sgd": lambda w, b, load: exchanges.LocalSteps(w, b, load.sync_every),
    "streaming_diloco_int4": _streaming,
    "async": lambda w, b, load: AsyncAverage(w, b, load.async_interval_s),
}
WITHOUT_VOTE = frozenset({"ddp", "ddp_fp16"})


@dataclass(frozen=True, slots=True)
class Steps:
    """step_s: mean time of the steps that count, of the job. sent_bytes: by a node's interface in a step, the mean,
    without background rounds. busy_s: of that interface."""

    step_s: float
    sent_bytes: float
    busy_s: float
    single_s: tuple[float, ...]


def simulate(cluster: Cluster, load: Workload, algorithm: str, seed: int = 0) -> Steps:
    """Raises ValueError for an algorithm that is not in ALGORITHMS."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    workers = Workers(cluster, seed)
    buckets = load.buckets()
    exchange = ALGORITHMS[algorithm](workers, buckets, load)
    job = _Job(workers, load, buckets, exchange, has_vote=algorithm not in WITHOUT_VOTE)
    first, last = _window(algorithm, load, cluster)
    ends: list[float] = []
    sent_before = busy_before = 0.0
    for step in range(last):
        if step == first:
            sent_before, busy_before = workers.link.sent_bytes, workers.link.busy_s
        job.step(step)
        ends.append(float(workers.script.at.max()))
    counted = last - first
    single = np.diff(ends[first - 1 :])
    return Steps(
        statistics.fmean(single),
        (workers.link.sent_bytes - sent_before) / counted,
        (workers.link.busy_s - busy_before) / counted,
        tuple(float(s) for s in single),
    )


def _window(algorithm: str, load: Workload, cluster: Cluster) -> tuple[int, int]:
    """The first step that counts, and the one behind the last: whole rounds where steps differ."""
    if algorithm == "local_sgd":
        return 1, 1 + load.sync_every
    if algorithm == "streaming_diloco_int4":
        return load.diloco_every, 2 * load.diloco_every
    if algorithm == "async":
        return WARM_UP, WARM_UP + 10 * STEPS
    return WARM_UP, WARM_UP + STEPS


class _Job:
    def __init__(
        self,
        workers: Workers,
        load: Workload,
        buckets: tuple[BucketPlan, ...],
        exchange: Exchange,
        has_vote: bool,
    ) -> None:
        self._workers = workers
        self._load = load
        self._exchange = exchange
        ready = load.model.ready_after()
        self._full_after = np.maximum.accumulate([max(ready[i] for i in plan.members) for plan in buckets])
        on_processor = workers.cluster.transport is Transport.GLOO
        rides = exchange.carries_vote and on_processor and carries_tail(buckets[-1])
        self._vote_s = vote_s(workers.cluster) if has_vote and not rides else 0.0

    def step(self, number: int) -> None:
        workers, script, load = self._workers, self._workers.script, self._load
        factors = workers.slowness()
        script.work(workers.costs.step_s)
        self._exchange.forward_begins(number)
        script.work(load.compute_s * load.forward_share * factors)
        by_size_s = workers.costs.step_s_per_byte * load.model.size_bytes
        backward = (load.compute_s * (1 - load.forward_share) + _IN_BACKWARD * by_size_s) * factors
        done = 0.0
        for bucket, full in enumerate(self._full_after):
            script.work(backward * (full - done))
            done = full
            self._exchange.launch(bucket)
        script.work(backward * (1 - done))
        workers.settle()
        voted_at_once = script.at.max() + self._vote_s
        self._exchange.backward_ends()
        if self._vote_s and self._exchange.votes_at_once:
            script.at = np.maximum(script.at, voted_at_once)
        elif self._vote_s:
            script.at = np.full_like(script.at, script.at.max() + self._vote_s)
        script.work((1 - _IN_BACKWARD) * by_size_s)
