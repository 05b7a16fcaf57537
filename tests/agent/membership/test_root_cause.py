"""Tables: which failure explains the others, by texts that real programs wrote; and how it is shown."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bagua_agent.membership.failures.root_cause import (
    Kind,
    RootCause,
    classify,
    first_cause,
    is_casualty,
    lines,
    of_one_time,
    root_cause,
)
from bagua_agent.membership.view import FailureView
from bagua_contract import membership_pb2 as pb

CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:28598. This is typically caused by a remote worker crashing."
)
RESET = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:35031: Connection reset by peer. This is typically caused by a remote worker hanging"
)
WATCHDOG = (
    "killed by SIGABRT after c10::DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog "
    "thread terminated with exception: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41"
)
CHAIN = """Traceback (most recent call last):
  File "train.py", line 9, in step
    dist.all_reduce(x)
{inner}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 12, in <module>
    raise TrainingError("step failed") from error
TrainingError: step failed"""


@pytest.mark.parametrize(
    ("summary", "kind"),
    [
        ("ValueError: boom", Kind.EXPLAINED),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Kind.EXPLAINED),
        ("RuntimeError: CUDA error: device-side assert triggered", Kind.EXPLAINED),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", Kind.EXPLAINED),
        ("killed by SIGSEGV", Kind.EXPLAINED),
        ("killed by SIGABRT", Kind.EXPLAINED),
        ("killed by SIGTERM after ValueError: boom", Kind.EXPLAINED),
        ("hung: 640 s outside the step's collectives (killed by SIGKILL)", Kind.EXPLAINED),
        ("DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
         "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", Kind.EXPLAINED),
        ("DistBackendError: NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details)",
         Kind.EXPLAINED),
        ("killed by SIGKILL", Kind.KILLED),
        ("killed by signal 40", Kind.KILLED),
        ("exit code 3", Kind.SILENT),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", Kind.NETWORK),
        ("requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('...'))", Kind.NETWORK),
        ("BrokenPipeError: [Errno 32] Broken pipe", Kind.NETWORK),
        ("EOFError", Kind.NETWORK),
        ("killed by SIGTERM", Kind.ASKED),
        ("killed by SIGINT", Kind.ASKED),
        (CLOSED, Kind.CASUALTY),
        (RESET, Kind.CASUALTY),
        (WATCHDOG, Kind.CASUALTY),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network "
         "error, NCCL version 2.27.5\\nncclRemoteError: A call failed possibly due to a network error", Kind.CASUALTY),
        ("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
         Kind.CASUALTY),
        ("DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", Kind.CASUALTY),
        ("RuntimeError: Rank 0 timed out in monitoredBarrier after 1000 ms.", Kind.CASUALTY),
        ("bagua_core.elastic.heal.heal_plan.StateGone: global ranks [1] were copying", Kind.CASUALTY),
        ("CollectiveFailed: allreduce: Connection closed by peer [10.0.0.2]:4711", Kind.CASUALTY),
        ("exit code 75", Kind.CASUALTY),
    ],
)  # fmt: skip
def test_kinds(summary: str, kind: Kind) -> None:
    assert classify(summary).kind is kind
    assert is_casualty(summary) is (kind is Kind.CASUALTY)


@pytest.mark.parametrize(
    ("summary", "tail", "kind"),
    [
        ("TrainingError: step failed", CHAIN.format(inner=CLOSED), Kind.CASUALTY),
        ("TrainingError: step failed", CHAIN.format(inner="ValueError: boom"), Kind.EXPLAINED),
        # what a script only logged before its own exception is not why it ended
        (
            "ValueError: boom",
            f"{CLOSED}\nTraceback (most recent call last):\nValueError: boom",
            Kind.EXPLAINED,
        ),
        ("exit code 1", f"giving up\n{CLOSED}\n", Kind.CASUALTY),
        ("exit code 1", "usage: train.py\n", Kind.SILENT),
    ],
)
def test_the_traceback_says_where_it_began(summary: str, tail: str, kind: Kind) -> None:
    assert classify(summary, tail).kind is kind


def failure(
    order: int,
    summary: str,
    exit_code: int = 1,
    node: str = "",
    tail: str = "",
    global_rank: int | None = None,
) -> FailureView:
    record = pb.Failure(
        worker_id=f"w{order}",
        node_name=node or f"node-{order % 2}",
        slot=order % 4,
        global_rank=order if global_rank is None else global_rank,
        exit_code=exit_code,
        cause=summary,
        log_path=f"/logs/w{order}",
        traceback_tail=tail or summary,
    )
    return FailureView.of(record, order)


def test_cause_is_found_by_what_it_says_and_not_by_arrival() -> None:
    endings = [
        failure(1, CLOSED),
        failure(2, "killed by SIGTERM", -15),
        failure(3, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        failure(4, WATCHDOG, -6),
        failure(5, "killed by SIGSEGV", -11),
    ]
    random.Random(0).shuffle(endings)
    found = root_cause(endings)
    assert found is not None and is_certain(found)
    assert found.cause.worker_id == "w5" and found.why == "a fault"
    assert [c.order for c in found.casualties] == [1, 2, 3, 4]
    assert found.others == ()


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (CLOSED, "killed by SIGKILL"),
        ("killed by SIGKILL", "ValueError: boom"),
        ("killed by SIGTERM", "exit code 1"),
        ("exit code 1", "killed by SIGBUS"),
        (RESET, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "ValueError: boom"),
    ],
)
def test_the_one_that_explains_more_is_the_cause(earlier: str, later: str) -> None:
    found = first_cause([failure(1, earlier), failure(2, later)])
    assert found is not None and found.order == 2


def test_of_equals_the_first_is_the_cause_and_the_other_is_told() -> None:
    found = root_cause([failure(2, "KeyError: 'b'"), failure(1, "ValueError: a")])
    assert found is not None
    assert found.cause.summary == "ValueError: a"
    assert [o.summary for o in found.others] == ["KeyError: 'b'"]


def is_certain(found: RootCause) -> bool:
    return classify(found.cause.summary, found.cause.traceback_tail).kind is not Kind.CASUALTY


def test_casualties_alone_leave_the_cause_uncertain() -> None:
    found = root_cause([failure(2, CLOSED), failure(1, RESET)])
    assert found is not None and found.cause.order == 1 and not is_certain(found)
    alone = root_cause([failure(1, "ConnectionResetError: [Errno 104] Connection reset by peer")])
    assert alone is not None and is_certain(alone), "alone it is the script's own"


def test_of_a_live_job_only_failures_of_one_time_belong_together() -> None:
    cause = replace(failure(9, "ValueError: boom"), seen_since_s=90_000.0)
    beside, days_ago = failure(8, CLOSED), failure(1, CLOSED)
    beside, days_ago = replace(beside, seen_since_s=89_990.0), replace(days_ago, seen_since_s=30.0)
    assert of_one_time(cause, [days_ago, beside, cause]) == [beside, cause]
    restarted = replace(cause, generation=3)
    slow, other = replace(days_ago, generation=3), replace(beside, generation=2)
    assert of_one_time(restarted, [slow, other, beside, restarted]) == [slow, restarted]


def test_no_failure_has_no_cause() -> None:
    assert root_cause([]) is None and first_cause([]) is None


def test_what_the_terminal_shows() -> None:
    tail = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: boom'
    found = root_cause(
        [failure(n, CLOSED, node=f"node-{n % 2}") for n in range(7)]
        + [failure(7, "ValueError: boom", node="node-1", tail=tail)]
    )
    assert found is not None
    assert list(lines(found)) == [
        "first failure: node-1, slot 3, global rank 7, exit code 1, files in /logs/w7",
        "    Traceback (most recent call last):",
        '      File "train.py", line 3, in <module>',
        "    ValueError: boom",
        "and 7 casualties on 2 nodes",
    ]


def test_no_files_are_named_where_there_are_none() -> None:
    found = root_cause([replace(failure(1, "exit code 3", 3, node="n", tail=""), log_path="")])
    assert found is not None
    assert next(iter(lines(found))) == "first failure: n, slot 1, global rank 1, exit code 3"


def test_a_signal_is_named_and_others_are_bounded() -> None:
    fault = failure(1, "killed by SIGSEGV", -11, node="n", tail="last words", global_rank=-1)
    found = root_cause(
        [fault, *(failure(n, f"ValueError: {n}") for n in range(2, 7)), failure(9, CLOSED, node="m")]
    )
    assert found is not None
    assert list(lines(found)) == [
        "first failure: n, slot 1, in no generation yet, killed by SIGSEGV, files in /logs/w1",
        "    killed by SIGSEGV",
        "    last words",
        "also failed: node-0, slot 2, global rank 2, exit code 1: ValueError: 2",
        "also failed: node-1, slot 3, global rank 3, exit code 1: ValueError: 3",
        "also failed: node-0, slot 0, global rank 4, exit code 1: ValueError: 4",
        "and 2 more failed by themselves",
        "and 1 casualty on 1 node",
    ]
