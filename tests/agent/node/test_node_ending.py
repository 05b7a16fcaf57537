"""The end of a node's part in a job, and its exit code, situation by situation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.node.live_workers import LONGEST_PROBLEM, MARGIN_S, usable_last_checkpoint, workers_share_s
from bagua_agent.node.node_ending import (
    RESULT_GRACE_S,
    STORE_AWAY_AT_THE_END_S,
    EndingSituation,
    how_it_ends,
)
from bagua_contract import membership_pb2 as pb

INFINITE = float("inf")
TRAINING = EndingSituation(
    workers_running=2,
    result=None,
    closed=False,
    leaving_signal=0,
    leaving_for_s=None,
    leave_known=True,
    shutdown_timeout_s=30.0,
    job_goes_on=True,
    awaits_result=False,
    prospect="left",
    trained=False,
    store_away_for_s=0.0,
    own_exit_code=0,
    restart_mode=False,
)
LEAVING = replace(TRAINING, leaving_signal=15, leaving_for_s=1.0)
SUCCEEDED = (pb.Result.SUCCEEDED, 0)
FAILED = (pb.Result.FAILED, 7)
STOPPED = (pb.Result.STOPPED, 0)
UNKNOWN_TO_OTHERS = replace(LEAVING, workers_running=0, leave_known=False)
LEFT_TO_THE_LEADER = replace(LEAVING, workers_running=0, job_goes_on=False, awaits_result=True)


# A signal more, or nothing has begun here
@pytest.mark.parametrize(
    ("situation", "exit_code", "grace_s"),
    [
        (TRAINING, None, None),
        (replace(TRAINING, workers_running=0), None, None),  # between a worker and its successor
        (replace(TRAINING, workers_running=0, trained=True), None, None),  # the leader says how it ended
        (replace(TRAINING, store_away_for_s=1000.0), None, None),  # training goes on without etcd
        (replace(TRAINING, trained=True, store_away_for_s=1000.0), None, None),
        (replace(TRAINING, workers_running=0, store_away_for_s=1000.0), None, None),
        # the result
        (replace(TRAINING, workers_running=0, result=SUCCEEDED), 0, None),
        (replace(TRAINING, result=SUCCEEDED, closed=True), None, None),  # the last one is on its way out
        (replace(TRAINING, result=SUCCEEDED), 0, RESULT_GRACE_S),  # this node came as the job ended
        (replace(TRAINING, workers_running=0, result=FAILED), 7, None),
        (replace(TRAINING, result=FAILED), 7, RESULT_GRACE_S),
        (replace(TRAINING, result=(pb.Result.STOPPED, 143)), 143, RESULT_GRACE_S),
        (replace(TRAINING, result=FAILED, restart_mode=True), 7, 30.0),  # scripts save in handlers of SIGTERM
        (replace(TRAINING, result=FAILED, restart_mode=True, shutdown_timeout_s=120.0), 7, 120.0),
        # etcd is away at the end
        (
            replace(TRAINING, workers_running=0, trained=True, store_away_for_s=STORE_AWAY_AT_THE_END_S),
            None,
            None,
        ),
        (
            replace(TRAINING, workers_running=0, trained=True, store_away_for_s=STORE_AWAY_AT_THE_END_S + 1),
            0,
            None,
        ),
        (
            replace(TRAINING, workers_running=0, trained=True, store_away_for_s=1000.0, own_exit_code=3),
            3,
            None,
        ),
        # leaving on a signal
        (LEAVING, None, None),
        (replace(LEAVING, workers_running=0), 0, None),
        (replace(LEAVING, workers_running=0, job_goes_on=False), 128 + 15, None),
        (replace(LEAVING, workers_running=0, job_goes_on=False, leaving_signal=2), 128 + 2, None),
        (replace(LEAVING, workers_running=0, job_goes_on=False, result=SUCCEEDED), 0, None),
        (replace(LEAVING, workers_running=0, job_goes_on=False, result=FAILED), 128 + 15, None),
        (replace(LEAVING, workers_running=0, job_goes_on=False, result=STOPPED), 128 + 15, None),
        # other nodes stay, unless they leave at the same moment: etcd has yet to say so
        (UNKNOWN_TO_OTHERS, None, None),
        (replace(UNKNOWN_TO_OTHERS, leaving_for_s=30.0), 128 + 15, None),
        (
            replace(UNKNOWN_TO_OTHERS, leaving_for_s=INFINITE),
            0,
            None,
        ),
        (replace(UNKNOWN_TO_OTHERS, store_away_for_s=1.0), None, None),
        (replace(UNKNOWN_TO_OTHERS, store_away_for_s=STORE_AWAY_AT_THE_END_S + 1), 128 + 15, None),
        # all nodes leave: the leader is about to say how the job ended
        (replace(LEFT_TO_THE_LEADER, leaving_for_s=29.9), None, None),
        (replace(LEFT_TO_THE_LEADER, leaving_for_s=30.0), 128 + 15, None),
        (replace(LEFT_TO_THE_LEADER, leaving_for_s=INFINITE), 128 + 15, None),  # a signal more
        (replace(LEFT_TO_THE_LEADER, store_away_for_s=1.0), None, None),
        (replace(LEFT_TO_THE_LEADER, store_away_for_s=STORE_AWAY_AT_THE_END_S + 1), 128 + 15, None),
        (replace(LEFT_TO_THE_LEADER, result=STOPPED), 128 + 15, None),
        (replace(LEAVING, leaving_for_s=30.0), 128 + 15, 0.0),
        (replace(LEAVING, leaving_for_s=INFINITE), 128 + 15, 0.0),  # the second signal
        (replace(LEAVING, workers_running=0, leaving_for_s=INFINITE), 0, None),
        (replace(LEAVING, leaving_for_s=0.0, shutdown_timeout_s=0.0), 128 + 15, 0.0),
    ],
)
def test_how_a_node_ends(situation: EndingSituation, exit_code: int | None, grace_s: float | None) -> None:
    ending = how_it_ends(situation)
    if exit_code is None:
        assert ending is None
    else:
        assert ending is not None
        assert (ending.exit_code, ending.end_workers_within_s) == (exit_code, grace_s)


def test_it_never_ends_with_workers_that_no_process_ends() -> None:
    """Whatever comes together: an ending either finds no worker running, or says how long they have."""
    for running in (0, 1):
        for result in (None, SUCCEEDED, FAILED):
            for leaving_for_s in (None, 0.0, 30.0, INFINITE):
                for job_goes_on in (True, False):
                    for away_s in (0.0, 1000.0):
                        ending = how_it_ends(
                            replace(
                                LEAVING,
                                workers_running=running,
                                result=result,
                                leaving_for_s=leaving_for_s,
                                job_goes_on=job_goes_on,
                                trained=True,
                                store_away_for_s=away_s,
                            )
                        )
                        if ending is not None:
                            assert (ending.end_workers_within_s is None) == (running == 0)


@pytest.mark.parametrize(
    ("told", "part", "problem"),
    [
        (pb.LastCheckpoint(part=1, parts=2, problem="x" * 10_000), 1, "x" * LONGEST_PROBLEM),
        (pb.LastCheckpoint(part=2, parts=2), None, ""),
    ],
    ids=["a long problem", "a part that cannot be"],
)
def test_what_a_worker_tells_of_its_last_checkpoint_fits_a_record(
    told: pb.LastCheckpoint, part: int | None, problem: str
) -> None:
    kept = usable_last_checkpoint(told)
    assert (part, problem) == (None, "") if kept is None else (kept.part, kept.problem) == (part, problem)


def test_workers_that_leave_never_count_on_time_that_their_node_lacks() -> None:
    assert workers_share_s(30.0) == 30.0 - MARGIN_S
    for grace_s in (0.1, 1.0, 3.0, 5.0, 6.0, 7.0, 300.0):
        assert 0.0 < workers_share_s(grace_s) < grace_s
