"""Decides whether this node's part in the job is over, and with which exit code. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bagua_contract import membership_pb2 as pb

STORE_AWAY_AT_THE_END_S = 10.0
UNKNOWN = "left, but etcd did not take this node's leave: whether other nodes go on with the job is not known"
RESULT_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class EndingSituation:
    """The facts that decide whether this node's part is over.

    result: outcome and exit code once the job has them. closed: every worker has committed its last step, and those
    here know it. leaving_for_s: the time since the first signal; infinite once workers are to end at once. leave_known:
    etcd has that this node leaves, so of several that leave at once the last sees the others. job_goes_on: other nodes
    stay. awaits_result: the leader is about to say how the job ended. prospect: the future of the job without this
    node. trained: a worker here confirmed the last commit. restart_mode: workers are unmodified scripts.
    """

    workers_running: int
    result: tuple[int, int] | None
    closed: bool
    leaving_signal: int
    leaving_for_s: float | None
    leave_known: bool
    shutdown_timeout_s: float
    job_goes_on: bool
    awaits_result: bool
    prospect: str
    trained: bool
    store_away_for_s: float
    own_exit_code: int
    restart_mode: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """The decision that this node's part is over. end_workers_within_s: grace for workers that still run; None if there
    are none."""

    exit_code: int
    reason: str
    end_workers_within_s: float | None = None


def result_grace_s(shutdown_timeout_s: float, *, restart_mode: bool) -> float:
    """Returns the time between SIGTERM and SIGKILL for workers of a job that failed, or ended without them. Scripts in
    restart mode have the shutdown timeout: they may save in a handler of SIGTERM, as under torchrun."""
    return shutdown_timeout_s if restart_mode else RESULT_GRACE_S


def how_it_ends(s: EndingSituation) -> Ending | None:
    """Returns how this node's part ends; None if it goes on."""
    if s.leaving_for_s is not None:
        return _leaving(s, s.leaving_for_s)
    if s.result is not None:
        outcome, exit_code = s.result
        if outcome == pb.Result.SUCCEEDED and s.workers_running and s.closed:
            return None  # a worker that the job no longer needs is on its way out
        # Else a node that came as the job ended: its workers would wait for a generation without end.
        grace_s = result_grace_s(s.shutdown_timeout_s, restart_mode=s.restart_mode)
        return Ending(exit_code, "", grace_s if s.workers_running else None)
    if s.workers_running == 0 and s.trained and s.store_away_for_s > STORE_AWAY_AT_THE_END_S:
        return Ending(
            s.own_exit_code, "all workers here are done; etcd is unavailable, so the job's result is unknown"
        )
    return None


def _leaving(s: EndingSituation, waited_s: float) -> Ending | None:
    interrupted = 128 + s.leaving_signal
    if s.workers_running == 0:
        may_wait = s.store_away_for_s <= STORE_AWAY_AT_THE_END_S and waited_s < s.shutdown_timeout_s
        if s.job_goes_on:
            if s.leave_known or waited_s == math.inf:
                return Ending(0, s.prospect)
            return None if may_wait else Ending(interrupted, UNKNOWN)
        if s.result is not None:
            return Ending(0 if s.result[0] == pb.Result.SUCCEEDED else interrupted, "")
        if s.awaits_result and may_wait:
            return None
        return Ending(interrupted, s.prospect)
    if waited_s >= s.shutdown_timeout_s:
        return Ending(interrupted, "ended at once", 0.0)
    return None
