"""A background operation ends in exactly one event, whatever it raises; every thread of the agent is of that kind.

The list of operations is read off the sources, so that a new thread without an entry here fails the first test.
"""

from __future__ import annotations

import ast
import errno
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

import bagua_agent
from bagua_agent.base.background import (
    Background,
    Failed,
    OperationEnd,
    Succeeded,
    background_thread,
    is_bug,
    perform,
)
from bagua_agent.base.errors import InfrastructureLost, InternalError, OperationDiscarded, UserError

DEADLINE_S = 10.0

ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: InfrastructureLost("etcd is away"),
    lambda: UserError("denied"),
    lambda: InternalError("a state that must not be"),
    lambda: OSError(errno.ENOSPC, "no space left on device"),
    lambda: BlockingIOError(errno.EAGAIN, "no process to be had"),
    lambda: RuntimeError("bug"),
    lambda: ValueError("bug"),
    lambda: MemoryError(),
    lambda: grpc.RpcError(),
    lambda: SystemExit(3),
)
ERROR_NAMES = [type(make()).__name__ for make in ERRORS]

# Threads that are not of background.py, and why. tests/agent/base/test_other_threads.py has a test of each.
OTHERS = {
    "rpc/control_server.py": "gRPC takes an executor of its own; it answers the caller with what a method raised",
    "rpc/session_server.py": "as above",
    "service/node/node_server.py": "as above",
    "rpc/first_message.py": "a timer that cancels a silent client's call, which raises nothing",
    "workers/stacks.py": "within one call, which raises what a part of it raised",
    "observation/agent_calls.py": "within one call, which raises what a part of it raised",
    "base/small_http.py": "a timer that shuts a slow client's connection; that it has gone is suppressed",
    "base/background.py": "the mechanism",
}


def calls(path: Path) -> set[str]:
    """Which of the ways to make a thread this file uses."""
    made = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id == "Timer":
                continue  # a class of file_timers.py; the thread is always written threading.Timer
            made.add(called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""))
    return made & {"Thread", "ThreadPoolExecutor", "Background", "background_thread", "Timer"}


def sources() -> dict[str, Path]:
    root = Path(bagua_agent.__file__).parent
    return {str(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}


def test_every_thread_of_the_agent_is_of_this_kind_or_says_why_not() -> None:
    bare = {
        name for name, path in sources().items() if calls(path) & {"Thread", "ThreadPoolExecutor", "Timer"}
    }
    assert bare == set(OTHERS)
    ours = {name for name, path in sources().items() if calls(path) & {"Background", "background_thread"}}
    assert {
        "leadership/leader_writes.py",
        "leadership/probes.py",
        "base/retrying_writes.py",
        "node/hang_orders.py",
        "service/blocking_work.py",
    } <= ours


Ends = queue.SimpleQueue[OperationEnd[object]]


def raising(error: BaseException) -> Callable[[], object]:
    def operation() -> object:
        raise error

    return operation


def in_an_executor(operation: Callable[[], object], ends: Ends) -> None:
    executor = Background("bagua-test")
    executor.run("the operation", operation, ends.put)
    after: Ends = queue.SimpleQueue()
    executor.run("the next", lambda: 7, after.put)
    assert after.get(timeout=DEADLINE_S) == Succeeded(7), "the executor goes on"
    assert executor.stop()


def in_a_thread(operation: Callable[[], object], ends: Ends) -> None:
    thread = background_thread("bagua-test", operation, ends.put)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def here(operation: Callable[[], object], ends: Ends) -> None:
    perform("the operation", operation, ends.put)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("way", [in_an_executor, in_a_thread, here])
@pytest.mark.parametrize("make", ERRORS, ids=ERROR_NAMES)
def test_whatever_it_raises_is_one_event(
    way: Callable[[Callable[[], object], Ends], None],
    make: Callable[[], BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends: Ends = queue.SimpleQueue()
    error = make()
    way(raising(error), ends)
    end = ends.get(timeout=DEADLINE_S)
    assert isinstance(end, Failed) and end.error is error and end.reason
    assert ends.empty()
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert bool(tracebacks) is is_bug(error), "the traceback of a bug is logged, and of nothing else"


@pytest.mark.parametrize("way", [in_an_executor, in_a_thread, here])
def test_a_value_is_one_event(way: Callable[[Callable[[], object], Ends], None]) -> None:
    ends: Ends = queue.SimpleQueue()
    way(lambda: "value", ends)
    assert ends.get(timeout=DEADLINE_S) == Succeeded("value") and ends.empty()


def test_what_has_not_begun_is_discarded_with_an_event() -> None:
    let_go, begun = threading.Event(), threading.Event()
    ends: Ends = queue.SimpleQueue()
    executor = Background("bagua-test")

    def hold() -> None:
        begun.set()
        let_go.wait(DEADLINE_S)

    executor.run("first", hold, ends.put)
    assert begun.wait(DEADLINE_S)
    executor.run("second", lambda: 2, ends.put)
    assert not executor.stop(timeout_s=0.0), "the first still runs"
    discarded = ends.get(timeout=DEADLINE_S)
    assert isinstance(discarded, Failed) and isinstance(discarded.error, OperationDiscarded)
    let_go.set()
    assert ends.get(timeout=DEADLINE_S) == Succeeded(None)
    assert executor.stop()
    executor.run("third", lambda: 3, ends.put)
    late = ends.get(timeout=DEADLINE_S)
    assert isinstance(late, Failed) and isinstance(late.error, OperationDiscarded) and ends.empty()


def test_an_owner_that_raises_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    executor = Background("bagua-test")
    executor.run("first", lambda: 1, raising_owner)
    ends: Ends = queue.SimpleQueue()
    executor.run("second", lambda: 2, ends.put)
    assert ends.get(timeout=DEADLINE_S) == Succeeded(2)
    assert executor.stop()
    assert any("did not take its end" in record.message for record in caplog.records)


def raising_owner(end: OperationEnd[int]) -> None:
    raise RuntimeError(f"can't take {end}")


def test_without_a_thread_the_end_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    executor = Background("bagua-test")
    ends: Ends = queue.SimpleQueue()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        executor.run("first", lambda: 1, ends.put)
    end = ends.get(timeout=DEADLINE_S)
    assert isinstance(end, Failed) and "can't start new thread" in end.reason
    executor.run("second", lambda: 2, ends.put)
    assert ends.get(timeout=DEADLINE_S) == Succeeded(2) and ends.empty()
    assert executor.stop()


def test_several_threads_work_beside_each_other() -> None:
    together = threading.Barrier(4)
    ends: Ends = queue.SimpleQueue()
    executor = Background("bagua-test", threads=4)
    for _ in range(4):
        executor.run("meet the others", lambda: together.wait(DEADLINE_S), ends.put)
    met = [ends.get(timeout=DEADLINE_S) for _ in range(4)]
    assert all(isinstance(end, Succeeded) for end in met)
    assert executor.stop()
