"""What a worker says of its collectives: numbers that are equal on all ranks, and nothing that is done."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import torch

from bagua_agent.observation.collectives import parse, waiting
from bagua_core.communication import flight_record
from bagua_core.communication.flight_record import KEPT, FlightRecord, bucket_launched
from bagua_core.communication.pending import DonePending
from bagua_core.worker import collectives_answer
from tests.core.communication.worlds import await_true, gloo_world, run_ranks

HOUR_NS = 3600 * 10**9
OURS = "of this test"  # the record is the process's: other tests may have left communicators


def names_shown() -> list[str]:
    return [record["name"] for record in flight_record.answer()["groups"]]


def said(record: FlightRecord, rank: int) -> Any:
    """As the worker of that rank alone would answer, an hour later."""
    answer = {"groups": [record.answer(time.monotonic_ns() + HOUR_NS)], "buckets": [], "torch": []}
    return parse(rank, f"slot {rank}", json.dumps({**answer, "torch_problem": ""}))


def test_a_rank_that_has_not_come_is_told_by_the_numbers() -> None:
    world = gloo_world(2)
    for member in world:
        member.flight.is_of(OURS, (0, 1))
    run_ranks(world, lambda member: member.allreduce(torch.ones(4)).wait())
    for member in world:
        assert said(member.flight, member.global_rank).groups[0].under_way == ()
    tensor = torch.ones(1024)
    early = world[0].allreduce(tensor)
    [found] = waiting([said(member.flight, member.global_rank) for member in world])
    assert (found.number, found.what, found.here, found.absent) == (2, "allreduce", (0,), (1,))
    message = world[1].receive(torch.ones(3), 0, 7)
    [shown] = said(world[1].flight, 1).groups[0].under_way
    assert (shown.number, shown.what, shown.size_bytes) == (0, "receive with rank 0", 12)
    assert waiting([said(world[0].flight, 0)])[0].unknown == (1,)

    run_ranks(world[1:], lambda member: member.allreduce(torch.ones(1024)).wait())
    world[0].send(torch.ones(3), 1, 7).wait()
    for pending in (early, message):
        pending.wait()
    await_true(lambda: not any(said(m.flight, m.global_rank).groups[0].under_way for m in world), "all done")
    assert names_shown().count(OURS) == 2
    for member in world:
        member.abort("the test ends")
    assert OURS not in names_shown(), "a lost generation is not shown"


def test_a_record_keeps_no_operation_and_no_more_than_its_room() -> None:
    [member] = gloo_world(1)
    record, pending = member.flight, DonePending()
    for _ in range(2 * KEPT):
        record.collective("allreduce", 4, pending)
    assert len(record._entries) == KEPT and record.answer(0)["begun"] == 2 * KEPT

    class Open(DonePending):
        def is_done(self) -> bool:
            return False

    hung = Open()
    record.collective("barrier", 1, hung)
    ours = 3_000  # the record is the process's: threads that other tests left may wait for buckets of theirs
    bucket_launched(ours, 64, hung)
    assert [u["what"] for u in record.answer(time.monotonic_ns())["under_way"]] == ["barrier"]
    assert ours in [b["bucket"] for b in flight_record.answer()["buckets"]]
    del hung
    gc.collect()
    assert record.answer(0)["under_way"] == []
    assert ours not in [b["bucket"] for b in flight_record.answer()["buckets"]]
    member.abort("the test ends")


def entry(number: int, **other: Any) -> dict[str, Any]:
    """As torch 2.13 writes it."""
    return {
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": number,
        "is_p2p": False,
        "input_sizes": [[10, 2]],
        "time_created_ns": 5 * 10**9,
        "retired": False,
        "state": "scheduled",
        **other,
    }


def test_torchs_own_record_in_the_same_form() -> None:
    entries = [
        entry(1, retired=True),
        entry(2, state="completed"),
        entry(3),
        entry(9, process_group=["", ""]),
        entry(4, profiling_name="nccl:all_reduce", state="started"),
        entry(1, is_p2p=True, profiling_name="nccl:send 0->1"),
    ]
    gloo, nccl = collectives_answer.flights(entries, {"0": {4: 1, 7: 0}}, 8 * 10**9)
    assert (gloo["name"], gloo["transport"], gloo["ranks"], gloo["begun"]) == (
        "0 (default_pg)",
        "gloo",
        [7, 4],
        3,
    )
    [shown] = gloo["under_way"]
    assert (shown["number"], shown["what"], shown["elements"], shown["since_s"]) == (3, "all_reduce", 20, 3.0)
    assert [u["number"] for u in nccl["under_way"]] == [4, 0]
    whole = json.dumps({"groups": [], "buckets": [], "torch": [gloo, nccl], "torch_problem": ""})
    assert [g.begun for g in parse(7, "slot 0", whole).groups] == [3, 4]


def test_a_worker_without_groups_of_torchs_says_so() -> None:
    answer = parse(0, "slot 0", collectives_answer.answer())
    assert answer.torch_problem == "the script has no process group of torch's"
