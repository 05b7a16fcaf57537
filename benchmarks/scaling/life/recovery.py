"""The time that each system loses to a change of membership: measured on three hosts, and how it grows with the job.

Measured values come from the kept results of benchmarks.rescale and benchmarks.rendezvous_scale. What no result has
is an assumption, equal for all systems, and is listed in `Assumptions` with its reason.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.result_file import RESULTS

RESCALE = RESULTS / "rescale-2026-11-30.json"
RENDEZVOUS = RESULTS / "rendezvous_scale-2026-11-22-3.json"
SYSTEMS = ("bagua", "torchft", "torchrun")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is not measured.

    group_s, group_each_s: to build a communicator, and for each node beside that: a guess, since no large group can be
    built here. collective_timeout_s: torchrun notices a silent host by it, half an hour by default; so the note of the
    kept result says. checkpoint_s: all stand still for a checkpoint. regular_checkpoint_s: between two checkpoints of
    a system that needs none after a failure. torchrun_each_s: its rendezvous, for each node (10 s for 4,000 published).
    """

    group_s: float = 0.2
    group_each_s: float = 0.001
    collective_timeout_s: float = 1800.0
    checkpoint_s: float = 5.0
    regular_checkpoint_s: float = 3600.0
    torchrun_each_s: float = 10.0 / 4000


@dataclass(frozen=True, slots=True)
class Recovery:
    """kill_s: from the loss of a host, whose connections close, to the others' next step. silent_s: of one that falls
    silent. join_pause_s: all others stand still. start_s: from the command on a new host until it is ready.
    restarts_all: every change ends all processes, and work since the last checkpoint is lost."""

    system: str
    kill_s: float
    silent_s: float
    join_pause_s: float
    start_s: float
    restarts_all: bool


def measured(assumed: Assumptions, values: list[Mapping[str, Any]] | None = None) -> dict[str, Recovery]:
    """Of each system, by the medians of the kept trials. values: of the result; None: read it."""
    if values is None:
        values = json.loads(RESCALE.read_text())["values"]

    def middle(system: str, name: str) -> float | None:
        found = [v[name] for v in values if v["system"] == system and v[name] is not None]
        return statistics.median(found) if found else None

    recoveries = {}
    for system in SYSTEMS:
        kill_s, pause_s, join_s = (middle(system, name) for name in ("kill_s", "join_pause_s", "join_s"))
        assert kill_s is not None and pause_s is not None and join_s is not None, (
            f"{system}: a value is missing"
        )
        silent_s = middle(system, "cut_s")
        recoveries[system] = Recovery(
            system,
            kill_s,
            assumed.collective_timeout_s + kill_s if silent_s is None else silent_s,
            pause_s,
            join_s,
            restarts_all=system == "torchrun",
        )
    return recoveries


def reform_s(nodes: int, values: Mapping[str, list[Mapping[str, Any]]] | None = None) -> float:
    """For all agents of a job of so many nodes to hear of a new generation after losses, beyond what a few need; by
    interpolation between the measured sizes. It contains the leader's own gathering."""
    if values is None:
        values = _kept_rendezvous()
    sizes = sorted(values, key=int)
    walls = [statistics.median(run["reforms"]["wall_s"] for run in values[size]) for size in sizes]
    at = [float(size) for size in sizes]
    return float(np.interp(nodes, [0.0, *at], [0.0, *walls]))


@functools.cache
def _kept_rendezvous() -> Mapping[str, list[Mapping[str, Any]]]:
    """Read once: each loss of a simulated life asks for it."""
    values: Mapping[str, list[Mapping[str, Any]]] = json.loads(RENDEZVOUS.read_text())["values"]
    return values


def pause_s(recovery: Recovery, nodes: int, is_silent: bool, copy_s: float, assumed: Assumptions) -> float:
    """After a loss, in a job of so many nodes. copy_s: of the state from a checkpoint, where that is read again."""
    detected_s = recovery.silent_s if is_silent else recovery.kill_s
    # torchft's quorum at that size is not measured: it is given none of the growth
    reform = reform_s(nodes) if recovery.system == "bagua" else 0.0
    read_s = copy_s if recovery.restarts_all else 0.0
    return detected_s + reform + read_s + _group_s(recovery, nodes, assumed)


def join_pause_s(recovery: Recovery, nodes: int, copy_s: float, step_s: float, assumed: Assumptions) -> float:
    """For the others, when a node joins; they hear of it while they train. copy_s: of the state to the joiner. Members
    wait for it at the end of a step, which hides a part; a system that restarts reads a checkpoint instead, in about
    that time."""
    waits_s = copy_s if recovery.restarts_all else max(0.0, copy_s - step_s)
    return recovery.join_pause_s + waits_s + _group_s(recovery, nodes, assumed)


def _group_s(recovery: Recovery, nodes: int, assumed: Assumptions) -> float:
    """NCCL's communicators are made while nothing runs, also those of a join."""
    group_s = assumed.group_s + assumed.group_each_s * nodes
    return group_s + (assumed.torchrun_each_s * nodes if recovery.restarts_all else 0.0)
