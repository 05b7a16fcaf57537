"""Proposes another algorithm for a job's steps, from what was measured, and keeps prediction and measurement together.

Pure. A proposal changes nothing: another algorithm is another arithmetic, so only people, or a tuner that they allowed
to, take it (invariant C5 of docs/design/autotuning.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bagua_agent.autotune.prediction import Link, Load, link_of, step_s
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import SWITCHABLE

WORTH_IT = 0.9  # of the measured time of a step, which a proposal must be predicted to fall below


@dataclass(frozen=True, slots=True)
class Workers:
    """The world as a prediction needs it. algorithm: of the script, or as people pinned it; empty: unknown. others:
    algorithms that may be proposed."""

    nodes: int = 0
    workers: int = 0
    algorithm: str = ""
    others: tuple[str, ...] = SWITCHABLE


NO_WORKERS = Workers()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed algorithm with its times, each of one step.

    algorithm: the fastest by prediction, of those that may take the place of `instead_of`, which took instead_of_s as
    measured, and would have taken instead_of_predicted_s. compute_s, link: what the prediction is made of. measured_s:
    with `algorithm`; 0: not yet.
    """

    algorithm: str
    predicted_s: float
    instead_of: str
    instead_of_s: float
    instead_of_predicted_s: float
    compute_s: float
    link: Link
    measured_s: float = 0.0

    @property
    def is_worth_it(self) -> bool:
        return self.predicted_s < WORTH_IT * self.instead_of_s

    def __str__(self) -> str:
        measured = f" and measured {_time(self.measured_s)}" if self.measured_s else ""
        verb = "is proposed" if self.is_worth_it else "is not proposed"
        return (
            f"{self.algorithm} {verb}: predicted {_time(self.predicted_s)}{measured} a step; {self.instead_of}: "
            f"predicted {_time(self.instead_of_predicted_s)} and measured {_time(self.instead_of_s)}; by "
            f"{self.link.bytes_per_s / 1e6:.3g} MB/s, latency {_time(self.link.latency_s)}, computation "
            f"{_time(self.compute_s)}"
        )

    def to_proto(self) -> pb.Proposal:
        return pb.Proposal(
            algorithm=self.algorithm,
            predicted_s=self.predicted_s,
            instead_of=self.instead_of,
            instead_of_s=self.instead_of_s,
            instead_of_predicted_s=self.instead_of_predicted_s,
            compute_s=self.compute_s,
            bytes_per_s=self.link.bytes_per_s,
            latency_s=self.link.latency_s,
            measured_s=self.measured_s,
        )

    @staticmethod
    def from_proto(p: pb.Proposal) -> Proposal:
        """Reads a proposal of a record. Raises ValueError."""
        link = Link(p.bytes_per_s, p.latency_s)
        times = (p.predicted_s, p.instead_of_s, p.instead_of_predicted_s, p.compute_s, p.measured_s)
        if not all(math.isfinite(x) and x >= 0 for x in (*times, link.bytes_per_s, link.latency_s)):
            raise ValueError("a proposal has times that are no numbers")
        if p.algorithm not in SWITCHABLE:
            raise ValueError(f"it proposes {p.algorithm[:40]!r}")
        return Proposal(
            p.algorithm,
            p.predicted_s,
            p.instead_of,
            p.instead_of_s,
            p.instead_of_predicted_s,
            p.compute_s,
            link,
            p.measured_s,
        )


def propose(
    world: Workers,
    algorithm: str,
    measured_step_s: float,
    compute_s: float,
    buckets: tuple[tuple[int, float], ...],
) -> tuple[Proposal | None, str]:
    """Returns a proposal, or None, and a line about it or about why there is none. algorithm: with which a step takes
    measured_step_s. buckets: as Measured has them."""
    if algorithm not in SWITCHABLE:
        return None, f"no algorithm is proposed instead of {algorithm or 'an unknown one'}"
    others = [name for name in world.others if name != algorithm]
    if not others:
        return None, f"no algorithm is proposed: none but {algorithm} is allowed"
    if world.nodes < 2:
        return None, "no algorithm is proposed: one node sends nothing over a network"
    link = link_of(buckets, world.workers)
    if link is None:
        return (
            None,
            "no algorithm is proposed: no times of plain sums (gradient_allreduce over Gloo) are known",
        )
    load = Load(compute_s, tuple(size for size, _ in buckets), world.nodes, world.workers)
    predicted = {name: step_s(name, load, link) for name in (algorithm, *others)}
    best = min(others, key=predicted.__getitem__)
    found = Proposal(best, predicted[best], algorithm, measured_step_s, predicted[algorithm], compute_s, link)
    return found, str(found)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
