"""The decisions of a scheduler: orders and outcomes to write, and each job's state with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from bagua_agent.cluster.cluster_view import OrderView, OutcomeView


class JobState(Enum):
    """The state of a job in its life. It is not stored: it follows from submission, orders, generation and outcome."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The state of a job once the plan is carried out. reason: a sentence for people. fits: the cluster's nodes are
    enough for it once other jobs end; only a queued job may not fit."""

    state: JobState
    reason: str
    nodes: tuple[str, ...] = ()
    fits: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of the scheduler. orders: of those nodes alone whose orders change, whole. outcomes: those not in the
    store yet. again_at_s: when to decide again if nothing changes until then; None: only a change requires it."""

    orders: Mapping[str, tuple[OrderView, ...]] = field(default_factory=dict)
    outcomes: Mapping[str, OutcomeView] = field(default_factory=dict)
    jobs: Mapping[str, JobPlan] = field(default_factory=dict)
    again_at_s: float | None = None
