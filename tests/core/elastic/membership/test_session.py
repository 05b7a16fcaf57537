"""The session between worker and agent, over a real Unix socket and real gRPC."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua_contract import session_pb2
from bagua_contract.records import PROTOCOL_VERSION, GenerationKind, SuspicionKind
from bagua_core.elastic.membership import session as module
from bagua_core.elastic.membership.session import EXIT_CODE_AGENT_LOST, AgentMessages, Session, SessionError
from tests.core.elastic.agents import DEADLINE_S, Agent
from tests.core.elastic.records import generation

ROOT = Path(__file__).parents[4]


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent("w0", "w1")
    yield agent
    agent.close()


@pytest.fixture
def attach(agent: Agent) -> Iterator[Callable[[str], Session]]:
    """Sessions of this process. All are closed before the agent is: an orphan ends its process."""
    sessions: list[Session] = []

    def make(worker_id: str) -> Session:
        sessions.append(Session(agent.socket, worker_id, threading.Condition()))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def await_news(session: Session, claim: Callable[[AgentMessages], bool]) -> AgentMessages:
    with session._changed:
        assert session._changed.wait_for(lambda: claim(session.news), DEADLINE_S), session.news
    return session.news


# -- both ways


def test_hello_and_welcome(agent: Agent, attach: Callable[[str], Session]) -> None:
    session = attach("w0")
    assert session.news == AgentMessages(welcome=True, nonce="nonce-1")
    [hello] = agent.said_by("w0")
    assert (hello.hello.worker_id, hello.hello.pid) == ("w0", os.getpid())


def test_a_worker_waits_until_its_agent_belongs_to_the_job() -> None:
    agent = Agent("w0", welcoming=False)
    try:
        sessions: list[Session] = []
        opening = threading.Thread(
            target=lambda: sessions.append(Session(agent.socket, "w0", threading.Condition()))
        )
        opening.start()
        agent.wait_for(lambda: len(agent._heard) == 1)
        assert not sessions
        agent.server.admit("later")
        opening.join(DEADLINE_S)
        assert sessions[0].news.nonce == "later"
        sessions[0].close()
    finally:
        agent.close()


def test_generations_reach_all_workers_or_those_named(agent: Agent, attach: Callable[[str], Session]) -> None:
    one, other = attach("w0"), attach("w1")
    agent.server.tell_generation(generation(1, "w0", "w1"))
    agent.server.tell_generation(generation(2, "w0"), ["w0"])
    assert await_news(one, lambda n: n.generation == generation(2, "w0")).generation
    assert await_news(other, lambda n: n.generation is not None).generation == generation(1, "w0", "w1")


def test_a_late_or_repeated_record_says_nothing_new(agent: Agent, attach: Callable[[str], Session]) -> None:
    session = attach("w0")
    numbers: list[int] = []
    session.on_news(lambda news: numbers.append(news.generation.number if news.generation else 0))
    newest = generation(5, "w0", kind=GenerationKind.FAILOVER)
    for record in (newest, generation(4, "w0"), newest, generation(5, "w0", "w1")):
        agent.server.tell_generation(record)
    agent.server.tell_close()  # in order, so all of them have come
    news = await_news(session, lambda n: n.close)
    assert news.generation == newest
    assert numbers == [5, 5], "one call for the record, one for the close"


def test_leave_close_and_refusal(agent: Agent, attach: Callable[[str], Session]) -> None:
    one, other = attach("w0"), attach("w1")
    agent.server.tell_leave()
    agent.server.tell_close()
    agent.server.tell_refused("w1", "seed: 1 instead of 2")
    assert await_news(other, lambda n: bool(n.refused)).refused == "seed: 1 instead of 2"
    assert await_news(one, lambda n: n.leave and n.close).refused == ""


def test_what_a_worker_says_arrives_in_order(agent: Agent, attach: Callable[[str], Session]) -> None:
    session = attach("w0")
    session.ready("127.0.0.1:4", {"seed": "1"})
    session.entered(3, 7, {"failover": 0.5})
    session.progress(
        session_pb2.Progress(generation=3, step=8, epoch=1, steps_per_s=2.5, metrics={"loss": 0.5})
    )
    session.suspect(3, SuspicionKind.BROKEN, hosts=("10.0.0.1",), detail="x" * 5000)
    session.suspect(3, SuspicionKind.STALLED, hosts=(), detail="")
    session.training_done(3, 9)
    session.left(3)
    session.close()
    agent.wait_for(lambda: agent._ended == ["w0"])
    said = agent.said_by("w0")
    assert [m.WhichOneof("kind") for m in said] == [
        "hello",
        "ready",
        "entered",
        "progress",
        "suspected",
        "suspected",
        "training_done",
        "left",
    ]
    _, ready, entered, progress, broken, stalled, done, left = said
    assert (ready.ready.store_address, dict(ready.ready.fingerprint)) == ("127.0.0.1:4", {"seed": "1"})
    assert (entered.entered.generation, entered.entered.step) == (3, 7)
    assert (progress.progress.epoch, progress.progress.steps_per_s) == (1, 2.5)
    assert dict(progress.progress.metrics) == {"loss": 0.5}
    assert (broken.suspected.kind, list(broken.suspected.hosts)) == (1, ["10.0.0.1"])
    assert len(broken.suspected.detail) == 500, "a transport's message may have any length"
    assert (stalled.suspected.kind, done.training_done.step, left.left.generation) == (2, 9, 3)


def test_a_closed_session_leaves_nothing(agent: Agent, attach: Callable[[str], Session]) -> None:
    session = attach("w0")
    session.close()
    agent.wait_for(lambda: agent._ended == ["w0"])
    assert not session._thread.is_alive()
    agent.server.tell_close()  # there is no receiver


def test_a_worker_id_can_attach_again_after_it_ended(agent: Agent, attach: Callable[[str], Session]) -> None:
    attach("w0").close()
    agent.wait_for(lambda: agent._ended == ["w0"])
    assert attach("w0").news.welcome


# -- refused


def test_an_unknown_worker_is_refused_with_a_reason(agent: Agent, attach: Callable[[str], Session]) -> None:
    with pytest.raises(SessionError, match="refused this worker: no worker 'stranger' is expected here"):
        attach("stranger")
    assert agent.said_by("stranger") == []


def test_a_second_session_of_one_worker_is_refused(agent: Agent, attach: Callable[[str], Session]) -> None:
    first = attach("w0")
    with pytest.raises(SessionError, match="no worker 'w0' is expected"):
        attach("w0")
    agent.server.tell_close()
    await_news(first, lambda n: n.close)


def test_another_protocol_is_refused(
    agent: Agent, attach: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROTOCOL_VERSION", 99)
    with pytest.raises(
        SessionError, match=f"worker speaks protocol 99, agent {PROTOCOL_VERSION}; install one version"
    ):
        attach("w0")


@pytest.mark.parametrize("somebody_listens", [True, False])
def test_an_agent_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, somebody_listens: bool
) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.1)
    agent = Agent("w0", welcoming=False)
    path = agent.socket if somebody_listens else f"{agent.socket}.not"
    began_s = time.monotonic()
    try:
        with pytest.raises(SessionError, match=rf"did not answer on {re.escape(path)} within 0.1 s"):
            Session(path, "w0", threading.Condition())
        assert time.monotonic() - began_s < 5
    finally:
        agent.close()  # this process must outlive it: the session is closed, not orphaned


# -- processes

WORKER = """
import sys, threading
from bagua_contract import session_pb2
from bagua_core.elastic.membership.session import Session
session = Session(sys.argv[1], "w0", threading.Condition())
print("attached", flush=True)
"""


def start_worker(agent_socket: str, rest: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER + rest, agent_socket],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},  # as the agent starts workers
    )


AGENT = """
import time
from tests.core.elastic.agents import Agent
agent = Agent("w0")
print(agent.socket, flush=True)
time.sleep(100)
"""


def test_a_worker_whose_agent_ends_ends_too(agent: Agent) -> None:
    worker = start_worker(agent.socket, "threading.Event().wait(60)")
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "attached\n"
        agent.server.stop()
        _, err = worker.communicate(timeout=DEADLINE_S)
        assert worker.returncode == EXIT_CODE_AGENT_LOST == 75
        assert "bagua: worker ends, for its agent is gone" in err
    finally:
        worker.kill()
        worker.communicate(timeout=DEADLINE_S)


def test_a_worker_whose_agent_is_killed_ends_whatever_it_does(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", AGENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": "/tmp"},
    )
    worker = None
    try:
        assert program.stdout is not None
        socket = program.stdout.readline().strip()
        worker = start_worker(socket, "while True: sum(range(1000))")
        assert worker.stdout is not None and worker.stdout.readline() == "attached\n"
        program.send_signal(signal.SIGKILL)
        assert worker.wait(DEADLINE_S) == EXIT_CODE_AGENT_LOST
    finally:
        for process in (program, worker):
            if process is not None:
                process.kill()
                process.communicate(timeout=DEADLINE_S)


FORKING = """
import multiprocessing, torch
context = multiprocessing.get_context("fork")
def work(number):
    a = torch.full((64, 64), float(number))
    (a @ a).sum().item()
torch.ones(4, 4) @ torch.ones(4, 4)
for begin in range(0, 50, 5):
    children = [context.Process(target=work, args=(n,)) for n in range(begin, begin + 5)]
    for child in children:
        child.start()
        session.progress(session_pb2.Progress(generation=1, step=begin))  # the parent's session goes on meanwhile
    for child in children:
        child.join(20)
        assert child.exitcode == 0, child.exitcode
print("forked", flush=True)
session.close()
"""


def test_a_worker_may_fork_children_that_work(agent: Agent) -> None:
    """As a DataLoader does. The session's threads and locks are of no use in a child and must not harm it."""
    worker = start_worker(agent.socket, FORKING)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "attached\n"
        number = 0
        deadline_s = time.monotonic() + 60
        pause = threading.Event()
        while worker.poll() is None:
            assert time.monotonic() < deadline_s, "a child or the worker hangs"
            number += 1
            agent.server.tell_generation(generation(number, "w0"))  # messages arrive while it forks
            pause.wait(0.005)
        out, err = worker.communicate(timeout=DEADLINE_S)
        assert (worker.returncode, out) == (0, "forked\n"), err
        assert [m.progress.step for m in agent.said_by("w0")[1:]] == [
            n for n in range(0, 50, 5) for _ in range(5)
        ]
    finally:
        worker.kill()
        worker.communicate(timeout=DEADLINE_S)
