"""The output of a job that was started by hand: which agents are asked for it, and what is said of lost bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.observation import job_output
from bagua_agent.observation.agent_calls import MOST_CALLED, AgentSeen
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.job_output import JobOutput
from bagua_agent.workers.output.output_options import Streams
from bagua_agent.workers.output.recent_output import KEPT_BYTES, RecentOutput
from bagua_contract import control_pb2
from bagua_contract import membership_pb2 as pb
from tests.agent.observation.facts import AnsweringAgents, agent, facts, generation, many_agents, worker


class OutputOfAgents(AnsweringAgents):
    """Each agent keeps one line of its worker."""

    def output(self, agent: AgentSeen, slot: int, stream: Any, position: int) -> control_pb2.ReadOutputReply:
        text = f"line of {agent.node_name}\n".encode()
        return control_pb2.ReadOutputReply(kept=True, position=position, data=text[position:])


class WritingWorker(AnsweringAgents):
    """One worker, which has written the next of `texts` at each look."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = iter(texts)
        self._recent = RecentOutput()

    def output(self, agent: AgentSeen, slot: int, stream: Any, position: int) -> control_pb2.ReadOutputReply:
        self._recent.add(slot, Streams.OUT, next(self._texts).encode())
        part = self._recent.read(slot, Streams.OUT, position)
        assert part is not None
        return control_pb2.ReadOutputReply(kept=True, position=part.position, data=part.data)


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


def test_output_that_is_not_kept_any_more_is_said_and_joins_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    one = facts(agents=(agent(0, worker(0)),), generation=generation(1))
    over = replace(one, result=pb.Result(outcome=pb.Result.SUCCEEDED))
    begun = "step 1 loss=0.50\nstep 2 loss=0."
    more = "41\n" + "".join(f"step {step} loss=0.25\n" for step in range(3, 20_003))
    with opened(monkeypatch, WritingWorker([begun, more, "the last\n"]), [one, one, over]) as (
        output,
        terminal,
    ):
        output.follow()
    lost = len(more) - KEPT_BYTES
    assert terminal.complaints == [f"h0:0: {lost} bytes of its output are not kept any more and not shown"]
    first, cut, after, *others, before_last, last = terminal.lines
    assert (first, cut, before_last, last) == (
        "step 1 loss=0.50",
        "step 2 loss=0.",
        "step 20002 loss=0.25",
        "the last",
    )
    assert more[lost:].startswith(after + "\n"), "a line that began in the gap goes on alone"
    assert all(re.fullmatch(r"step \d+ loss=0.25", line) for line in others)


def test_output_from_before_the_first_look_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = facts(agents=(agent(0, worker(0)),), generation=generation(1))
    with opened(monkeypatch, WritingWorker(["line\n" * KEPT_BYTES]), [one]) as (output, terminal):
        output.show()
    assert terminal.complaints == [] and set(terminal.lines[1:]) == {"line"}
