"""Fits the costs of the simulator to measured steps, and compares its predictions with held-out ones. Pure.

The fit minimizes the squares of the logarithms of predicted over measured, by damped least squares over the logarithms
of the costs. Each cost is also drawn weakly to its first guess, so that one that no setting reveals stays there.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from benchmarks.scaling import models
from benchmarks.scaling.hardware import Cluster, Costs, Network, Transport, sharing
from benchmarks.scaling.lab.observations import Observation, Setting, is_at_most_1gbit
from benchmarks.scaling.steps.step import Workload, simulate
from benchmarks.tradeoff_plots import bits_per_s
from tests.lab.network import LINK_BURST_BYTES

Vector = npt.NDArray[np.float64]
GUESS_WEIGHT = 0.02  # a guess that is wrong by a factor of e costs as much as a prediction that is by 2 %
WITHIN = 0.1
_ROUNDS = 25
_NUDGE = 0.03


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is fitted, of one host with a processor of its own; see Costs. latency_s: of one message. compute_s: of a
    step where processors compute, else not used. exponent: see Costs.shared_by."""

    wire_share: float = 0.93
    transport_s_per_byte: float = 4e-10
    memory_s_per_byte: float = 2e-10
    codec_s_per_value: float = 5e-10
    collective_s: float = 2e-4
    step_s: float = 3e-3
    step_s_per_byte: float = 4e-10
    latency_s: float = 1e-4
    compute_s: float = 0.06
    exponent: float = 0.8

    def cluster(self, setting: Setting, cores: int) -> Cluster:
        costs = Costs(
            wire_share=min(self.wire_share, 1.0),
            transport_s_per_byte=self.transport_s_per_byte,
            memory_s_per_byte=self.memory_s_per_byte,
            codec_s_per_value=self.codec_s_per_value,
            collective_s=self.collective_s,
            step_s=self.step_s,
            step_s_per_byte=self.step_s_per_byte,
        ).shared_by(setting.hosts, cores, self._exponent(setting))
        latency_s = self.latency_s * sharing(setting.hosts, cores, self._exponent(setting))
        network = Network(bits_per_s(setting.rate) / 8, latency_s, burst_bytes=LINK_BURST_BYTES)
        return Cluster(setting.hosts, network, costs, Transport.GLOO, vote_latency_s=latency_s)

    def _exponent(self, setting: Setting) -> float:
        """Hosts that compute are always at work; those that sleep meet on the processors less often."""
        return 1.0 if setting.computes else self.exponent

    def load(self, setting: Setting, cores: int) -> Workload:
        compute_s = setting.compute_s
        if setting.computes:
            compute_s = self.compute_s * sharing(setting.hosts, cores, self._exponent(setting))
        model = models.uniform("lab", setting.sizes)
        return Workload(model, compute_s, int(setting.bucket_cap_mb * 1024 * 1024))


_NAMES = tuple(field.name for field in fields(Fitted))


def predict(fitted: Fitted, setting: Setting, algorithm: str, cores: int) -> float:
    """Seconds of one step."""
    return simulate(fitted.cluster(setting, cores), fitted.load(setting, cores), algorithm).step_s


def fit(observed: Sequence[Observation], cores: int, start: Fitted | None = None) -> Fitted:
    """By the observations that are not held out. Raises ValueError if there is none."""
    known = [o for o in observed if not o.setting.held_out]
    if not known:
        raise ValueError("no observation to fit: all of them are held out")
    start = Fitted() if start is None else start
    measured = np.log([o.typical_s for o in known])
    guess = _vector(start)

    def residuals(at: Vector) -> Vector:
        found = _fitted(at)
        predicted = np.log([predict(found, o.setting, o.algorithm, cores) for o in known])
        return np.concatenate([predicted - measured, GUESS_WEIGHT * (at - guess)])

    at, damping = guess, 1e-2
    error = residuals(at)
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(at + _nudge(i)) - error) / _NUDGE for i in range(len(at))], axis=1)
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ error)
        tried = at + np.clip(step, -0.7, 0.7)
        new = residuals(tried)
        if new @ new < error @ error:
            gained = float(error @ error - new @ new)
            at, error, damping = tried, new, damping / 3
            if gained < 1e-7:
                break
        else:
            damping *= 5
            if damping > 1e4:
                break
    return _fitted(at)


def _nudge(index: int) -> Vector:
    nudge = np.zeros(len(_NAMES))
    nudge[index] = _NUDGE
    return nudge


def _vector(fitted: Fitted) -> Vector:
    return np.log([getattr(fitted, name) for name in _NAMES])


def _fitted(at: Vector) -> Fitted:
    return replace(Fitted(), **{name: float(value) for name, value in zip(_NAMES, np.exp(at), strict=True)})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one algorithm in one setting. is_met: within 10 % up to 1 Gbit/s, beyond within the spread of the repeats.
    busy: share of the processors' time that the workers of all hosts need; 0: not measured."""

    setting: Setting
    algorithm: str
    measured_s: float
    least_s: float
    most_s: float
    predicted_s: float
    busy: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def is_met(self) -> bool:
        if is_at_most_1gbit(self.setting.rate):
            return abs(self.error) <= WITHIN
        return self.least_s <= self.predicted_s <= self.most_s


def compare(fitted: Fitted, observed: Sequence[Observation], cores: int) -> list[Comparison]:
    return [
        Comparison(
            o.setting,
            o.algorithm,
            o.typical_s,
            *o.spread_s,
            predict(fitted, o.setting, o.algorithm, cores),
            o.setting.hosts * o.processor_s / (cores * statistics.fmean(o.step_s)),
        )
        for o in observed
    ]


def cores_here() -> int:
    return len(os.sched_getaffinity(0))
