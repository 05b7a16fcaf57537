"""An agent that serves as many calls as it can refuses one more, and is not called silent for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import pytest

from bagua_agent.dashboard.page_data import page_data
from bagua_agent.etcd.client import KeyValue
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job.new_identity import make_identity
from bagua_agent.observation import agent_calls
from bagua_agent.observation.agent_calls import AgentBusy, JobAgents
from bagua_agent.observation.job_collectives import read_collectives
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.verdict import verdict
from bagua_agent.rpc.control_server import MOST_LOOKING, ControlServer
from bagua_agent.rpc.node_answers import NoAnswers
from bagua_contract import control_pb2
from bagua_contract import membership_pb2 as pb
from tests.agent.observation.facts import facts
from tests.lab.wait import HANG_S

KEYS = JobKeys("demo")
IDENTITY = make_identity("demo")


class SlowAnswers(NoAnswers):
    """Answers once `goes_on` is set; `begun` counts the calls that wait for it."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Semaphore(0), threading.Event()

    def node(self) -> control_pb2.ReadNodeReply:
        self.begun.release()
        self.goes_on.wait(HANG_S)
        return control_pb2.ReadNodeReply(agent_id="a0", node_name="h0", store_answers=True)


@contextmanager
def closing_down(server: ControlServer, answers: SlowAnswers) -> Iterator[None]:
    try:
        yield
    finally:
        answers.goes_on.set()
        server.stop()


class LargeAnswers(NoAnswers):
    """Answers with more than a channel of gRPC's takes."""

    def node(self) -> control_pb2.ReadNodeReply:
        return control_pb2.ReadNodeReply(agent_id="a0", node_name="h" * 5_000_000)


class KeyPairAlone:
    def get(self, key: str) -> KeyValue:
        assert key == KEYS.identity
        return KeyValue(key, IDENTITY.encode(), 1, 1)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobAgents]:
    monkeypatch.setattr(agent_calls, "CALL_TIMEOUT_S", HANG_S)
    found = JobAgents(cast(Any, KeyPairAlone()), "demo")
    yield found
    found.close()


def test_an_answer_that_is_too_large_is_no_sign_of_a_busy_agent(agents: JobAgents) -> None:
    server = ControlServer("127.0.0.1", IDENTITY, "a0", lambda: [], answers=LargeAnswers())
    record = pb.Agent(agent_id="a0", node_name="h0", control_address=server.address)
    try:
        [seen] = agents.look([KeyValue(KEYS.agent("a0"), record.SerializeToString(), 1, 1)])
    finally:
        server.stop()
    assert seen.node is None and not seen.busy


def test_an_agent_that_refuses_one_more_call_is_busy_and_not_silent(agents: JobAgents) -> None:
    answers = SlowAnswers()
    server = ControlServer("127.0.0.1", IDENTITY, "a0", lambda: [], answers=answers)
    record = pb.Agent(agent_id="a0", node_name="h0", control_address=server.address)
    records = [KeyValue(KEYS.agent("a0"), record.SerializeToString(), 1, 1)]
    with ThreadPoolExecutor(MOST_LOOKING) as pool, closing_down(server, answers):
        others = [pool.submit(agents.look, records) for _ in range(MOST_LOOKING)]
        assert all(answers.begun.acquire(timeout=HANG_S) for _ in others)
        refused = agents.look(records)
        assert [(seen.node, seen.busy, seen.is_silent) for seen in refused] == [(None, True, False)]
        with pytest.raises(AgentBusy, match="refused the call: too many calls at once"):
            agents.stacks(refused[0], 0)
        answers.goes_on.set()
        assert all(seen.node is not None for other in others for seen in other.result(HANG_S))
        [after] = agents.ask_again(refused)
        assert after.node is not None and not after.busy
    seen = facts(agents=refused)
    assert "does not answer" not in verdict(seen, JobSeries()).what
    assert [node["state"] for node in page_data(seen, JobSeries(), "")["nodes"]] == ["trains, busy"]
    assert [worker.problem for worker in read_collectives(agents, seen)] == [
        "its agent serves too many calls at once"
    ]
