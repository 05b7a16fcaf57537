"""The terminal's lines: one per event, readable without knowledge of the code."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from bagua_agent.job_state.console import (
    PROGRESS_EVERY_S,
    JobTerminal,
    change_in_force,
    describe_change,
    ended_before,
    generation_written,
    job_loss,
    mean_metrics,
    names,
    progress,
    result,
    scaled,
    straggler,
    suspicion,
    whose_metrics,
)
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement

FAILOVER, PLANNED, RESTART = GenerationKind.FAILOVER, GenerationKind.PLANNED, GenerationKind.RESTART
GATHERING = GenerationKind.GATHERING


def generation(
    number: int, *workers: str, kind: GenerationKind = PLANNED, reason: str = "2 nodes are complete"
) -> Generation:
    """workers: as NODE:SLOT or, for another process there, NODE:SLOT:COUNT."""
    return Generation(
        number=number,
        base=number - 1,
        kind=kind,
        members=tuple(
            Placement(
                w, f"agent-{w.split(':')[0]}", w.split(":")[0], int(w.split(":")[1]), r, 0, 0, "", 1, 1, True
            )
            for r, w in enumerate(workers)
        ),
        reason=reason,
    )


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], ""),
        (["b", "a", "b"], "a, b"),
        ([f"n{i}" for i in range(6)], "n0, n1, n2, n3, n4, n5"),
        ([f"n{i}" for i in range(9)], "n0, n1, n2, n3, n4, n5 and 3 more"),
    ],
)
def test_long_lists_are_cut_short(items: list[str], text: str) -> None:
    assert names(items) == text


BEFORE = generation(1, "a:0", "a:1", "b:0", "b:1")


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (generation(2, "a:0", "a:1", "b:0", "b:1"), "same workers"),
        (generation(2, "a:0", "a:1", "b:0", "b:1", "c:0"), "+c"),
        (generation(2, "a:0", "a:1"), "-b"),
        (generation(2, "a:0", "a:1", "c:0", "c:1"), "+c -b"),
        (generation(2, "a:0", "a:1", "b:0"), "-b:1"),  # one worker of a node that stays
        (generation(2, "a:0", "a:1", "b:0", "b:1:2"), "+b:1 -b:1"),  # respawned
        (generation(2), "-a, b"),
    ],
)
def test_a_change_names_nodes_or_the_workers_of_nodes_that_stay(after: Generation, text: str) -> None:
    assert describe_change(BEFORE, after) == text


def restarted(number: int, *workers: str) -> Generation:
    """workers: as NODE:SLOT. Each is a new process, and its id says of which generation."""
    kept = generation(number, *workers, kind=RESTART)
    members = (replace(m, worker_id=f"{m.agent_id}.{m.slot}.g{number}") for m in kept.members)
    return replace(kept, base=0, members=tuple(members))


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (("a:0", "a:1", "b:0", "b:1"), "same workers"),
        (("b:0", "b:1", "a:0", "a:1"), "same workers"),
        (("a:0", "a:1", "b:0", "b:1", "c:0"), "+c"),
        (("a:0", "a:1"), "-b"),
        (("a:0", "a:1", "c:0", "c:1"), "+c -b"),
        (("a:0", "a:1", "b:0"), "-b:1"),
        ((), "-a, b"),
    ],
)
def test_workers_that_are_started_again_are_the_same_slots(workers: tuple[str, ...], text: str) -> None:
    before = restarted(1, "a:0", "a:1", "b:0", "b:1")
    assert describe_change(before, restarted(2, *workers)) == text


def test_the_same_slot_of_two_nodes_is_not_the_same() -> None:
    assert describe_change(restarted(1, "a:0"), restarted(2, "b:0")) == "+b -a"


def test_the_first_generation_names_its_nodes() -> None:
    assert describe_change(None, BEFORE) == "a, b"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (None, generation(1, "a:0"), "generation 1, now: 1 worker on 1 node (a); 2 nodes are complete"),
        (
            BEFORE,
            generation(2, "a:0", "a:1", "b:0", "b:1", "c:0"),
            "generation 2, at the next step boundary: 5 workers on 3 nodes (+c); 2 nodes are complete",
        ),
        (
            BEFORE,
            generation(2, "a:0", "a:1", kind=FAILOVER, reason="b is gone"),
            "generation 2, now: 2 workers on 1 node (-b); b is gone",
        ),
        (BEFORE, generation(2, kind=FAILOVER, reason="too few"), "generation 2, now: no workers; too few"),
        (
            restarted(1, "a:0", "b:0"),
            restarted(2, "a:0", "b:0"),
            "generation 2, now: 2 workers on 2 nodes (same workers); 2 nodes are complete",
        ),
    ],
)
def test_a_generation_in_one_line(before: Generation | None, after: Generation, text: str) -> None:
    assert generation_written(before, after) == text


def test_the_line_of_a_job_that_begins_to_train_names_no_change_and_no_cost() -> None:
    gathered = replace(BEFORE, kind=GATHERING)
    entered = session_pb2.Entered(generation=2, step=1, lost_s={"heal": 0.5})
    begins = generation(2, "a:0", "a:1", "b:0", "b:1", reason="training begins")
    line = "generation 2 is in force from step 1: 4 workers on 2 nodes; training begins"
    assert change_in_force(gathered, begins, entered) == line
    joined = generation(2, "a:0", "a:1", "b:0", "b:1", "c:0", reason="training begins")
    line = "generation 2 is in force from step 1: 5 workers on 3 nodes (+c); training begins"
    assert change_in_force(gathered, joined, entered) == line
    line = "generation 2 is in force from step 1: 4 workers on 2 nodes (same workers); training begins; 0.5 s without "
    assert change_in_force(BEFORE, begins, entered) == line + "steps: heal"


def test_progress_in_one_line() -> None:
    told = session_pb2.Progress(epoch=1, step=20, steps_per_s=3.456, generation=4)
    numbers = {"loss": 0.123456, "acc": 1.0}
    assert progress(told, numbers) == "epoch 1  step 20  3.5 steps/s  acc 1  loss 0.1235  (generation 4)"
    assert progress(told, numbers, whose_metrics(1, 1, 2)) == (
        "epoch 1  step 20  3.5 steps/s  acc 1  loss 0.1235 on this node  (generation 4)"
    )
    assert "on this node" not in progress(told, {}, whose_metrics(0, 1, 2))
    told.total_steps, told.step_samples = 500, 64
    assert (
        progress(told, {})
        == "epoch 1  step 20 of 500  3.5 steps/s  221.2 samples/s  2 min left  (generation 4)"
    )
    assert progress(session_pb2.Progress(generation=1), {}) == "epoch 0  step 0  (generation 1)"


@pytest.mark.parametrize(
    ("losses", "world_size", "text"),
    [
        (0, 4, "  acc 1  loss 9 on this node"),
        (4, 4, "  loss 0.5, mean of 4 workers  acc 1 on this node"),
        (1, 4, "  loss 0.5, 1 of 4 workers  acc 1 on this node"),
    ],
)
def test_the_loss_is_the_jobs_where_it_is_known(losses: int, world_size: int, text: str) -> None:
    told = session_pb2.Progress(generation=4, job_loss=0.5, job_losses=losses)
    line = progress(told, {"loss": 9.0, "acc": 1.0}, " on this node", job_loss(told, world_size))
    assert line == f"epoch 0  step 0{text}  (generation 4)"


@pytest.mark.parametrize(
    ("reporting", "here", "world_size", "text"),
    [
        (1, 1, 1, ""),
        (2, 2, 2, ", mean of 2 workers"),
        (1, 2, 2, ", 1 of 2 workers"),
        (2, 2, 4, " on this node"),
        (0, 0, 1, " on this node"),  # the record is not known any more
    ],
)
def test_a_line_says_whose_numbers_it_has(reporting: int, here: int, world_size: int, text: str) -> None:
    assert whose_metrics(reporting, here, world_size) == text


def test_numbers_of_a_node_are_means_over_its_workers() -> None:
    one, other = (session_pb2.Progress(metrics=m) for m in ({"loss": 1.0, "only": 5.0}, {"loss": 2.0}))
    assert mean_metrics([one, other]) == {"loss": 1.5, "only": 5.0}


# -- the terminal


def test_every_line_says_when_and_where() -> None:
    said: list[str] = []
    JobTerminal(said.append, "host-1").tell("hello")
    assert re.fullmatch(r"bagua \d\d:\d\d:\d\d host-1 \| hello", said[0])


def test_the_same_text_on_a_topic_is_said_once() -> None:
    said: list[str] = []
    terminal = JobTerminal(said.append, "h")
    for topic, text in [("a", "1"), ("a", "1"), ("b", "1"), ("a", "2"), ("a", "1")]:
        terminal.tell_once(topic, text)
    assert [line.split("| ")[1] for line in said] == ["1", "1", "2", "1"]


def test_progress_is_held_back_and_its_text_is_not_made_for_nothing() -> None:
    said: list[str] = []
    made: list[str] = []
    terminal = JobTerminal(said.append, "h")

    def text(now_s: float) -> str:
        made.append(f"{now_s:g}")
        return made[-1]

    for now_s in (100.0, 100.5, 100.0 + PROGRESS_EVERY_S, 101.0 + PROGRESS_EVERY_S):
        terminal.tell_progress(now_s, partial(text, now_s))
    assert [line.split("| ")[1] for line in said] == ["100", f"{100 + PROGRESS_EVERY_S:g}"]
    assert made == ["100", f"{100 + PROGRESS_EVERY_S:g}"]


def test_a_straggler_in_one_line() -> None:
    told = session_pb2.Straggler(generation=1, step=300, global_rank=1, computing_s=0.3, others_s=0.1)
    place = BEFORE.members[1]
    assert straggler(told, place) == (
        f"global rank 1 ({place.node_name}, slot {place.slot}) is the slowest: it computes 0.3 s a step, "
        "3.0 times as long as the others (0.1 s), and they wait for it"
    )
    assert straggler(session_pb2.Straggler(global_rank=2, recovered=True), None) == (
        "global rank 2 keeps pace again"
    )


def test_casualties_are_one_line_below_their_cause() -> None:
    failure = pb.Failure(
        node_name="b", slot=1, global_rank=3, exit_code=-11, cause="killed by SIGSEGV", log_path="/logs"
    )
    ended = pb.Result(
        outcome=pb.Result.FAILED, reason="why", failure=failure, casualties="and 7 casualties on 2 nodes"
    )
    assert list(result("demo", ended)) == [
        "job demo failed: why",
        "first failure: b, slot 1, global rank 3, killed by SIGSEGV, files in /logs",
        "    killed by SIGSEGV",
        "and 7 casualties on 2 nodes",
    ]


def test_a_traceback_that_this_terminal_has_shown_is_not_repeated() -> None:
    failure = pb.Failure(
        agent_id="b0",
        node_name="b",
        slot=1,
        global_rank=3,
        exit_code=1,
        cause="ValueError: x",
        log_path="/logs",
    )
    failure.traceback_tail = "Traceback (most recent call last):\nValueError: x"
    ended = pb.Result(outcome=pb.Result.FAILED, reason="why (ValueError: x)", failure=failure)
    where = "first failure: b, slot 1, global rank 3, exit code 1, files in /logs"
    short = ["job demo failed: why (ValueError: x)", where]
    assert list(result("demo", ended, lambda failed: failed.agent_id == "b0")) == short
    assert list(result("demo", ended)) == [
        *short,
        "    Traceback (most recent call last):",
        "    ValueError: x",
    ]


def test_a_worker_that_another_generation_takes_along_is_not_said_to_be_at_its_end() -> None:
    broken = session_pb2.Suspected(generation=3, kind=pb.Suspicion.BROKEN, detail="Connection reset by peer")
    assert suspicion(broken) == "a worker here waits for another generation: Connection reset by peer"
    unbuilt = session_pb2.Suspected(
        generation=4, kind=pb.Suspicion.UNBUILT, detail="generation 4 can't be built here: no answer"
    )
    assert suspicion(unbuilt) == (
        "a worker here goes on without the pending generation: generation 4 can't be built here: no answer"
    )


def test_what_is_wanted_after_scale_in_one_line() -> None:
    assert scaled((1, 3), (1, 1)) == "wanted now: 1 node, instead of 1 to 3 nodes"
    assert scaled((2, 2), (2, 8)) == "wanted now: 2 to 8 nodes, instead of 2 nodes"


@pytest.mark.parametrize(
    ("outcome", "said"),
    [(pb.Result.SUCCEEDED, "succeeded"), (pb.Result.FAILED, "failed"), (pb.Result.STOPPED, "was stopped")],
)
def test_a_job_that_is_run_again_says_how_it_ended(outcome: pb.Result.Outcome, said: str) -> None:
    before = pb.Result(outcome=outcome, reason="so it was")
    assert ended_before("demo", before, None) == f"job demo {said} before (so it was); it begins anew"
    assert ended_before("demo", before, "/c").endswith("; it goes on from the newest checkpoint in /c")
