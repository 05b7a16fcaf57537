"""The simulated workers of a job: the clocks of their threads, their links, and the work on their devices."""

from __future__ import annotations

import numpy as np

from benchmarks.scaling.hardware import Cluster, Costs
from benchmarks.scaling.steps.timeline import Clock, Link, Times


class Workers:
    """script: of the thread that trains, or of the device that it gives its work to. A node's workers are one entry:
    the slowest of them counts."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = np.random.default_rng(seed)
        self.script = Clock(cluster.nodes)
        self.link = Link(cluster, self.random)
        self._delayed_s = 0.0

    @property
    def costs(self) -> Costs:
        return self.cluster.costs

    def device_work(self, clock: Clock, seconds: float) -> None:
        """Compression or arithmetic by the thread of `clock`. On a device that also computes, it takes the time from
        the computation, which `settle` adds before the backward ends."""
        clock.work(seconds)
        if self.cluster.shares_device and clock is not self.script:
            self._delayed_s += seconds

    def settle(self) -> None:
        self.script.work(self._delayed_s)
        self._delayed_s = 0.0

    def slowness(self) -> Times:
        """[nodes]: by what each node's computation of one step is longer. The slowest of a node's workers counts."""
        spread, cluster = self.cluster.spread, self.cluster
        factors = np.ones(cluster.nodes)
        if spread.sigma:
            drawn = self.random.normal(0.0, spread.sigma, (cluster.nodes, cluster.workers_per_node))
            factors = np.exp(drawn).max(axis=1)
        factors[: spread.slow_nodes] *= spread.slow_factor
        return factors
