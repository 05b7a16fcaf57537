"""Which ranks have not begun a collective, from what each worker says; odd answers are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bagua_agent.observation.agent_calls import AgentSeen
from bagua_agent.observation.collectives import OddAnswer, WorkerCollectives, as_json, parse, text_of, waiting
from bagua_agent.observation.job_collectives import read_collectives
from bagua_contract import control_pb2
from tests.agent.observation.facts import AnsweringAgents, facts, generation, many_agents


def under_way(number: int, since_s: float, what: str = "allreduce") -> dict[str, Any]:
    return {"number": number, "what": what, "bytes": 4096, "since_s": since_s}


def group(begun: int, *operations: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "name": "all",
        "transport": "gloo",
        "generation": 3,
        "ranks": [0, 1, 2],
        "begun": begun,
        "under_way": list(operations),
        **other,
    }


def said(rank: int, *groups: dict[str, Any], **other: Any) -> WorkerCollectives:
    answer = {"groups": groups, "buckets": [], "torch": [], "torch_problem": "", **other}
    return parse(rank, f"slot {rank} of h0", json.dumps(answer))


def test_a_rank_that_has_not_begun_it_is_named() -> None:
    workers = [
        said(0, group(8, under_way(8, 12.0)), buckets=[{"bucket": 2, "bytes": 4096, "since_s": 12.1}]),
        said(1, group(7)),
        said(2, group(8, under_way(8, 11.0))),
    ]
    [found] = waiting(workers)
    assert (found.number, found.here, found.absent, found.unknown) == (8, (0, 2), (1,), ())
    text = text_of(workers, 1)
    assert text.startswith(
        "Ranks 0, 2 wait in allreduce number 8 (generation 3, all, gloo), for 12 s; Rank 1 has not begun it.\n"
    )
    assert text.index("rank 1, slot 1") < text.index("rank 0, slot 0"), "the rank that was asked for is first"
    assert "bucket 2 of gradients, 4,096 bytes, for 12 s" in text
    assert "nothing is under way" in text
    assert as_json(workers)["waiting"][0]["absent"] == (1,)


def test_a_rank_that_is_further_has_begun_it_and_one_that_is_silent_is_unknown() -> None:
    workers = [
        said(0, group(8, under_way(8, 5.0))),
        said(1, group(9, under_way(9, 2.0))),
        WorkerCollectives(None, "h2", problem="its agent does not answer"),
    ]
    [found] = waiting(workers)
    assert (found.number, found.here, found.absent, found.unknown) == (8, (0,), (), (2,))
    assert "Rank 2 did not answer" in text_of(workers) and "no answer: its agent" in text_of(workers)


def test_ranks_of_nodes_that_are_not_asked_are_called_so() -> None:
    class Agents(AnsweringAgents):
        def collectives(self, agent: AgentSeen, slot: int) -> control_pb2.ReadCollectivesReply:
            here = group(8, under_way(8, 5.0), ranks=list(range(67)))
            answer = {"groups": [here], "buckets": [], "torch": [], "torch_problem": ""}
            return control_pb2.ReadCollectivesReply(answer=json.dumps(answer))

    large = facts(agents=many_agents(67), generation=generation(66))
    agents = Agents()
    try:
        workers = read_collectives(agents, large)
    finally:
        agents.close()
    [found] = waiting(workers)
    assert (len(found.here), found.absent, found.unknown, found.not_asked) == (64, (), (66,), (64, 65))
    text = text_of(workers, 65)
    assert "; Rank 66 did not answer; Ranks 64, 65 were not asked." in text
    assert "\nrank 65, slot 0 of h65\n  no answer: it was not asked: a job's first 64 nodes are\n" in text
    assert "\nno rank, h66\n  no answer: it was not asked: a job's first 64 nodes are\n" in text


def test_all_ranks_in_it_is_a_matter_of_the_network() -> None:
    workers = [said(rank, group(8, under_way(8, 5.0))) for rank in range(3)]
    assert "all ranks have begun it" in text_of(workers)


@pytest.mark.parametrize(
    "operation", [under_way(8, 0.2), under_way(0, 50.0, "send with rank 1")], ids=["short", "a message"]
)
def test_what_names_no_rank(operation: dict[str, Any]) -> None:
    workers = [said(0, group(8, operation)), said(1, group(7))]
    assert waiting(workers) == ()
    assert text_of(workers).startswith("No collective has been under way for 1 s.")


def test_groups_of_other_generations_and_members_are_not_compared() -> None:
    workers = [
        said(0, group(8, under_way(8, 5.0))),
        said(1, group(3, generation=2)),
        said(2, group(1, ranks=[2])),
    ]
    [found] = waiting(workers)
    assert (found.absent, found.without_group, found.unknown) == ((), (1, 2), ())
    assert "; Ranks 1, 2 answered without such a group.\n" in text_of(workers)


def test_a_rank_that_has_begun_no_collective_of_torchs_group_has_not_come_to_it() -> None:
    """Torch's flight recorder has a group from its first collective on."""
    workers = [
        said(0, torch=[group(1, under_way(1, 5.0), generation=0, name="0", ranks=[0, 1, 2, 3])]),
        said(1),
        said(2, torch_problem="the script has no process group of torch's"),
        WorkerCollectives(3, "slot 3 of h0", problem="KeyError"),
    ]
    [found] = waiting(workers)
    assert (found.absent, found.without_group, found.unknown) == ((1,), (2,), (3,))
    assert text_of(workers).startswith(
        "Rank 0 waits in allreduce number 1 (torch's group 0, gloo), for 5.0 s; Rank 1 has not begun it; Rank 2 "
        "answered without such a group; Rank 3 did not answer.\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"groups": 1}',
        json.dumps({"groups": [group(1, under_way(1, float("nan")))], "buckets": [], "torch": []}),
        json.dumps({"groups": [{"name": "all"}], "buckets": [], "torch": [], "torch_problem": ""}),
        json.dumps({"groups": [group(1, ranks=5)], "buckets": [], "torch": [], "torch_problem": ""}),
    ],
)
def test_odd_answers(answer: str) -> None:
    with pytest.raises(OddAnswer):
        parse(0, "slot 0 of h0", answer)


def test_names_of_a_worker_make_no_line_of_their_own() -> None:
    worker = said(0, group(1, under_way(1, 5.0, "x\nRank 7 waits\x1b[2J")))
    assert "\nRank 7" not in text_of([worker]) and "\x1b" not in text_of([worker])
    assert parse(0, "h0", '{"problem": "KeyError"}').problem == "KeyError"
