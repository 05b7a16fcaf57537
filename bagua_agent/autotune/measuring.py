"""Measures the steps of each generation from the reports of global rank 0's worker. Pure but for what it remembers.

Only the agent of that worker measures. A generation's first report begins its measurement, so the steps before it, in
which connections and caches are new, do not count for its rate. What trying costs contains them (`Measured.before_s`).
"""

from __future__ import annotations

from bagua_agent.autotune.study_records import Measured
from bagua_contract import session_pb2
from bagua_contract.records import Generation
from bagua_contract.time_use import TimeUse

MOST_BUCKETS = 256  # whose times are passed on
MOST_ORDERED = 4096  # of more tensors the order is not passed on: it would be in each record of a generation


class Measuring:
    def __init__(self) -> None:
        self._worker_id = ""
        self._since_generation = 0  # of that worker's place
        self._generation = 0
        # Steps of the worker, their seconds and those of computing, when the measurement of the generation began
        self._begin = (0, 0.0, 0.0)
        # Steps of the worker, and their seconds with those of switches, when it became global rank 0
        self._origin = (0, 0.0)
        self._before = (0, 0.0)  # the same since then, when the measurement of the generation began
        self._switched_s = 0.0  # of the worker, by its last report
        self._switch_s = 0.0  # of the generation
        self._order: tuple[int, ...] = ()
        self._buckets: tuple[tuple[int, float], ...] = ()
        self._world = (0, 0)  # workers and nodes, between which they were measured

    def take(
        self, worker_id: str, progress: session_pb2.Progress, newest: Generation | None
    ) -> Measured | None:
        """Returns the measurement so far; None if the report adds nothing: of another worker than global rank 0, or of
        another generation than the newest."""
        if progress.order and len(progress.order) <= MOST_ORDERED:
            self._order = tuple(progress.order)
        if newest is not None and self._world != (world := (newest.world_size, newest.node_count)):
            self._world, self._buckets = world, ()  # sums of other workers say nothing of these ones' network
        is_current = newest is not None and progress.generation == newest.number
        if is_current and 0 < len(progress.bucket_times) <= MOST_BUCKETS:
            self._buckets = tuple((one.bytes, one.seconds) for one in progress.bucket_times)
        place = None if newest is None else newest.placement_of(worker_id)
        steps, seconds = sum(progress.step_counts), progress.step_sum_s
        switched_s = progress.spent_s.get(TimeUse.SWITCH.value, 0.0)
        if newest is None or place is None or place.global_rank != 0 or progress.generation != newest.number:
            if worker_id == self._worker_id:
                self._switched_s = switched_s
                if newest is not None and (place is None or place.global_rank != 0):
                    self._worker_id = ""  # what it trains meanwhile, another agent measures
            return None
        if (worker_id, place.since_generation) != (self._worker_id, self._since_generation):
            self._worker_id, self._since_generation = worker_id, place.since_generation
            self._switched_s = switched_s
            self._generation = 0
            self._origin = (steps, seconds + switched_s)
        if progress.generation != self._generation:
            self._generation = progress.generation
            self._begin = (steps, seconds, progress.computing_s)
            self._before = (steps - self._origin[0], seconds + switched_s - self._origin[1])
            self._switch_s = max(0.0, switched_s - self._switched_s)
            self._switched_s = switched_s
            return None
        if steps <= self._begin[0]:
            return None
        return Measured(
            generation=progress.generation,
            steps=steps - self._begin[0],
            seconds=max(0.0, seconds - self._begin[1]),
            switch_s=self._switch_s,
            gradient_bytes=progress.gradient_bytes,
            order=self._order,
            computing_s=max(0.0, progress.computing_s - self._begin[2]),
            buckets=self._buckets,
            warms_up=progress.warms_up,
            before_steps=self._before[0],
            before_s=max(0.0, self._before[1]),
        )
