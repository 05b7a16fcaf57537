"""The losses that explain a failure of a live job, and the effect on the budget. Tables, and one property."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import agent, failure, member, picture, record

from bagua_agent.membership.failures.restart_policy import in_doubt, judge
from bagua_agent.membership.failures.root_cause import (
    KEY_IS_GONE,
    LOST_WITH_NODE,
    NO_ANSWER,
    REPLICA_OVER,
    explains,
    first_cause,
)
from bagua_agent.membership.failures.secondary_failure import (
    MOST_FORMER_CO_WORKERS,
    NO_CO_WORKERS,
    CoWorkers,
    co_workers_after,
    co_workers_in,
    secondary_failure_cause,
)
from bagua_agent.membership.view import FailureView, JobView
from bagua_contract.records import Generation
from bagua_contract.replica import Replica, ReplicaMember

PEER_LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:28598"
)
CONNECTION_LOST = "ConnectionResetError: [Errno 104] Connection reset by peer"
KILLED, RAISED, ASKED = "killed by SIGKILL", "ValueError: bad", "killed by SIGTERM"
SUMMARIES = (PEER_LOST, CONNECTION_LOST, KILLED, RAISED, ASKED, "exit code 3")

BOTH, WITHOUT_B, ANOTHER_B = record(1, "a0 b0 c0"), record(2, "a0 c0"), record(3, "a0 c0 b0x:3")


def co_workers(*records: Generation, worker: str = "a0") -> CoWorkers:
    found = NO_CO_WORKERS
    for one in records:
        found = co_workers_after(found, worker, one)
    return found


def failed(worker: str, summary: str, *, order: int = 1, tail: str = "") -> FailureView:
    script = not summary.startswith("killed")
    known = failure(worker, order=order, script=script)
    return replace(known, summary=summary, traceback_tail=tail)


def view_of(record_: Generation, *failures: FailureView, finished: str = "", agents: str = "abc") -> JobView:
    view = picture([agent(a) for a in agents], [member("c0")], record_, failures=failures)
    return replace(view, finished=frozenset(finished.split()))


# -- co-workers


def test_co_workers_are_those_of_all_records_that_list_the_worker() -> None:
    found = co_workers(BOTH, WITHOUT_B, ANOTHER_B)
    assert {f.worker_id: f.last_listed for f in found.co_workers} == {"b0": 1, "c0": 3, "b0x": 3}
    assert found.newest == 3
    assert str(found.co_workers[0]) == "global rank 1 on host-b"


def test_records_without_the_worker_tell_of_no_co_workers() -> None:
    assert co_workers(record(1, "b0 c0"), worker="a0") == NO_CO_WORKERS
    assert co_workers(BOTH, record(2, "b0 c0 d0"), worker="a0") == co_workers(BOTH)


def test_a_long_life_does_not_fill_the_memory() -> None:
    found = NO_CO_WORKERS
    for number in range(1, 500):
        found = co_workers_after(found, "a0", record(number, f"a0 b{number % 10}{'x' * (number // 10)}"))
    assert len(found.co_workers) == MOST_FORMER_CO_WORKERS + 1
    assert found.co_workers[-1].last_listed == 499


# -- whose end it was


@pytest.mark.parametrize(
    ("summary", "co_worker", "records", "explained"),
    [
        (PEER_LOST, KILLED, [BOTH], True),
        (PEER_LOST, RAISED, [BOTH], True),
        (PEER_LOST, ASKED, [BOTH], True),
        (PEER_LOST, CONNECTION_LOST, [BOTH], True),
        (CONNECTION_LOST, KILLED, [BOTH], True),
        (CONNECTION_LOST, RAISED, [BOTH, WITHOUT_B], True),
        # a group of the script's own may be used again only later
        (PEER_LOST, KILLED, [BOTH, WITHOUT_B, ANOTHER_B], True),
        (CONNECTION_LOST, KILLED, [BOTH, WITHOUT_B, ANOTHER_B], False),
        # of two that only tell of others the first is the cause, and for the moment only
        (PEER_LOST, PEER_LOST, [BOTH, WITHOUT_B], True),
        (PEER_LOST, PEER_LOST, [BOTH, WITHOUT_B, ANOTHER_B], False),
        # a failure that does not mention a lost peer is no casualty
        (RAISED, KILLED, [BOTH], False),
        ("exit code 3", KILLED, [BOTH], False),
        (CONNECTION_LOST, PEER_LOST, [BOTH], False),
        # never met
        (PEER_LOST, KILLED, [WITHOUT_B], False),
        (PEER_LOST, KILLED, [], False),
    ],
)
def test_an_end_explains_that_of_a_co_worker(
    summary: str, co_worker: str, records: list[Generation], explained: bool
) -> None:
    own = failed("a0", summary, order=9)
    view = view_of(records[-1] if records else BOTH, failed("b0", co_worker), own)
    found = secondary_failure_cause(own, co_workers(*records), view)
    assert found == (f"global rank 1 on host-b ({co_worker})" if explained else "")


def test_of_several_causes_the_likeliest_is_named() -> None:
    own = failed("a0", PEER_LOST, order=9)
    view = view_of(BOTH, failed("c0", PEER_LOST, order=1), failed("b0", KILLED, order=2), own)
    assert (
        secondary_failure_cause(own, co_workers(BOTH), view) == "global rank 1 on host-b (killed by SIGKILL)"
    )


def test_the_traceback_counts_as_in_restart_mode() -> None:
    tail = f"{PEER_LOST}\n\nThe above exception was the direct cause of the following exception:\n\nStepFailed: 7"
    own = failed("a0", "StepFailed: 7", order=9, tail=tail)
    assert secondary_failure_cause(own, co_workers(BOTH), view_of(BOTH, failed("b0", KILLED)))


@pytest.mark.parametrize(
    ("view", "gone"),
    [
        (view_of(WITHOUT_B), True),  # left, or dropped because its host did not answer
        (view_of(BOTH, agents="ac"), True),  # too few remain for a record without it
        (view_of(BOTH), False),
        (view_of(WITHOUT_B, finished="b0"), False),  # its script was done
        (view_of(WITHOUT_B, failed("b0", PEER_LOST, order=10)), False),  # its own record says how
    ],
)
def test_a_co_worker_that_is_gone_without_a_word_explains_too(view: JobView, gone: bool) -> None:
    own = failed("a0", PEER_LOST, order=9)
    assert secondary_failure_cause(own, co_workers(BOTH), view) == (
        "global rank 1 on host-b (gone)" if gone else ""
    )
    assert secondary_failure_cause(replace(own, summary=RAISED), co_workers(BOTH), view) == ""


def test_a_lost_connection_is_explained_by_who_went_of_late() -> None:
    own = failed("a0", CONNECTION_LOST, order=9)
    assert (
        secondary_failure_cause(own, co_workers(BOTH, WITHOUT_B), view_of(WITHOUT_B))
        == "global rank 1 on host-b (gone)"
    )
    assert secondary_failure_cause(own, co_workers(BOTH, WITHOUT_B, ANOTHER_B), view_of(ANOTHER_B)) == ""


def test_a_script_that_breaks_by_itself_uses_up_the_budget() -> None:
    """Two slots whose own group breaks every few steps, in turn: a process is not explained by one it never met, nor
    by one that was explained itself long ago."""
    number, workers, failures, counted = 1, ["a0", "b0"], {}, 0
    companies = {w: co_workers(record(1, "a0 b0 c0"), worker=w) for w in workers}
    for turn in range(12):
        loser = workers[turn % 2]
        own = failed(loser, PEER_LOST, order=turn + 1)
        now = record(number, " ".join([*workers, "c0"]))
        view = view_of(now, *failures.values(), own)
        counted += secondary_failure_cause(own, companies[loser], view) == ""
        failures[loser] = own
        workers[turn % 2] = loser + "x"
        # a generation of those who are left, then one with the successor
        left = [w for w in workers if w != loser + "x"]
        for one in (
            record(number + 1, " ".join([*left, "c0"])),
            record(number + 2, " ".join([*workers, "c0"])),
        ):
            for w in workers:
                companies[w] = co_workers_after(companies.get(w, NO_CO_WORKERS), w, one)
        number += 2
    assert counted == 12


@given(st.lists(st.sampled_from(SUMMARIES), min_size=1, max_size=6))
def test_of_any_failures_at_once_one_is_the_cause_and_explains_what_restart_mode_does_not_charge(
    summaries: list[str],
) -> None:
    names = "abcdef"[: len(summaries)]
    failures = [
        failed(f"{n}0", text, order=k + 1) for k, (n, text) in enumerate(zip(names, summaries, strict=True))
    ]
    together = record(1, " ".join(f"{n}0" for n in names))
    view = view_of(together, *failures, agents=names)
    cause = first_cause(failures)
    assert cause is not None
    explained = {
        f.worker_id
        for f in failures
        if secondary_failure_cause(f, co_workers(together, worker=f.worker_id), view)
    }
    assert cause.worker_id not in explained
    assert explained == {f.worker_id for f in failures if explains(cause, f)}


# -- the budget


def test_failures_in_doubt_are_those_without_which_the_job_goes_on() -> None:
    real = failed("b0", RAISED, order=2)
    doubtful = replace(failed("a0", PEER_LOST), seen_since_s=5.0)
    alone = [doubtful]
    assert judge(alone, 0).fail and in_doubt(alone, 0, trained=True, since_s=0.0) == (doubtful,)
    assert in_doubt(alone, 0, trained=True, since_s=5.1) == (), "looked into"
    assert in_doubt([real, doubtful], 1, trained=True, since_s=0.0) == (doubtful,)
    assert in_doubt([real, doubtful], 0, trained=True, since_s=0.0) == (), "the job fails in any case"
    lost = replace(doubtful, summary=CONNECTION_LOST)
    assert in_doubt([lost], 0, trained=True, since_s=0.0) == (lost,)
    uncounted = replace(doubtful, script_failure=False)
    assert not judge([uncounted], 0).fail


@pytest.mark.parametrize("summary", [PEER_LOST, CONNECTION_LOST])
def test_a_casualty_is_no_second_failure_of_the_same_samples(summary: str) -> None:
    raised, casualty = failed("b0", RAISED), replace(failed("a0", summary, order=2), script_failure=False)
    assert not judge([raised, casualty], 1).fail
    assert judge([raised, failed("a0", RAISED, order=2)], 9).fail


# -- replicas

REPLICAS = replace(
    BOTH,
    members=tuple(
        replace(m, replica_rank=rank // 2, shard_rank=rank % 2)
        for rank, m in enumerate(record(1, "a0 b0 c0 d0").members)
    ),
)
OVER = f"{REPLICA_OVER}: the worker in slot 0 of host-a failed: {PEER_LOST} (killed by SIGKILL)"


def test_a_worker_that_was_killed_for_another_one_does_not_explain_its_end() -> None:
    """Gloo's words on a mismatch of a script's own collectives are those on a lost peer."""
    found = co_workers(REPLICAS)
    own = failed("a0", PEER_LOST, order=9)
    killed = replace(failed("b0", OVER, order=2), script_failure=False)
    assert secondary_failure_cause(own, found, view_of(record(2, "c0 d0"), killed, agents="abcd")) == ""
    # nor does the replica's absence from the next generation, which is what a0's end caused
    assert secondary_failure_cause(own, found, view_of(record(2, "c0 d0"), agents="abcd")) == ""
    # but its host's loss does, and another replica's end
    assert "(gone)" in secondary_failure_cause(own, found, view_of(record(2, "c0 d0"), agents="acd"))
    assert secondary_failure_cause(own, found, view_of(BOTH, failed("c0", KILLED), agents="abcd"))


@pytest.mark.parametrize(
    ("why", "is_casualty"),
    [
        (f"the worker in slot 0 of host-a {LOST_WITH_NODE}", True),
        (f"the worker in slot 0 of host-a {KEY_IS_GONE}, the worker in slot 1 of host-a {KEY_IS_GONE}", True),
        (f"host-a {NO_ANSWER}", True),
        (f"the worker in slot 0 of host-a failed: RuntimeError: host-x {NO_ANSWER}", False),
        (
            f"the worker in slot 0 of host-a {KEY_IS_GONE}, the worker in slot 1 of host-a failed: {PEER_LOST}",
            False,
        ),
        ("another worker of it on this node has ended", False),
    ],
)
def test_a_worker_that_was_killed_for_a_silent_host_explains_the_end_of_one_there(
    why: str, is_casualty: bool
) -> None:
    """The host was cut off for a moment, and its worker finds its mate's connection closed."""
    killed = replace(
        failed("b0", f"{REPLICA_OVER}: {why} (killed by SIGKILL)", order=2), script_failure=False
    )
    view = view_of(record(2, "c0 d0"), killed, agents="abcd")
    assert (
        bool(secondary_failure_cause(failed("a0", PEER_LOST, order=9), co_workers(REPLICAS), view))
        is is_casualty
    )
    assert not secondary_failure_cause(failed("a0", RAISED, order=9), co_workers(REPLICAS), view)


def test_before_a_generation_the_others_of_a_replica_are_co_workers() -> None:
    replica = Replica("a0", tuple(ReplicaMember(w, w[0], f"host-{w[0]}", 0, "h:2") for w in ("a0", "b0")))
    found = co_workers_in(replica, "a0")
    assert [str(f) for f in found.co_workers] == ["shard 1 on host-b"]
    own = failed("a0", PEER_LOST, order=9)
    assert secondary_failure_cause(own, found, view_of(record(2, "c0 d0"), agents="abcd")) == ""
    assert secondary_failure_cause(
        own, found, view_of(record(2, "c0 d0"), failed("b0", KILLED), agents="abcd")
    )
