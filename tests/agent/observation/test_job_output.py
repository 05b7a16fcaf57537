"""The output of a job that was started by hand: which agents are asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.observation import job_output
from bagua_agent.observation.agent_calls import MOST_CALLED, AgentSeen
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.job_output import JobOutput
from bagua_contract import control_pb2
from tests.agent.observation.facts import AnsweringAgents, facts, generation, many_agents


class OutputOfAgents(AnsweringAgents):
    """Each agent keeps one line of its worker."""

    def output(self, agent: AgentSeen, slot: int, stream: Any, position: int) -> control_pb2.ReadOutputReply:
        text = f"line of {agent.node_name}\n".encode()
        return control_pb2.ReadOutputReply(kept=True, position=position, data=text[position:])


@dataclass
class Terminal:
    lines: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@contextmanager
def opened(
    monkeypatch: pytest.MonkeyPatch, agents: AnsweringAgents, looks: list[JobFacts], rank: int | None = None
) -> Iterator[tuple[JobOutput, Terminal]]:
    """looks: what etcd and the agents show, one after the other; the last one goes on."""
    terminal = Terminal()

    def read_facts(*_: object) -> JobFacts:
        return looks.pop(0) if len(looks) > 1 else looks[0]

    monkeypatch.setattr(job_output, "JobAgents", lambda *_: agents)
    monkeypatch.setattr(job_output, "read_facts", read_facts)
    monkeypatch.setattr(job_output, "LOOK_S", 0.0)
    output = JobOutput(
        cast(Any, None),
        "demo",
        ("out",),
        rank,
        lambda line: terminal.lines.append(line.text),
        terminal.complaints.append,
    )
    try:
        yield output, terminal
    finally:
        output.close()


def test_nodes_that_are_not_asked_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    large = facts(agents=many_agents(80), generation=generation(80))
    with opened(monkeypatch, OutputOfAgents(), [large]) as (output, terminal):
        output.show()
        output.show()
    assert terminal.lines == [f"line of h{rank}" for rank in range(MOST_CALLED)]
    assert terminal.complaints == [
        "the output of 16 nodes is left out, since a job's first 64 nodes are asked; --rank shows a rank of any node"
    ]


def test_the_agent_of_a_rank_is_asked_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    large = facts(agents=many_agents(80), generation=generation(78))
    with opened(monkeypatch, OutputOfAgents(), [large], rank=77) as (output, terminal):
        output.show()
    assert (terminal.lines, terminal.complaints) == (["line of h77"], [])
    with (
        opened(monkeypatch, OutputOfAgents(), [large], rank=78) as (output, _),
        pytest.raises(UserError, match="no rank 78"),
    ):
        output.show()
