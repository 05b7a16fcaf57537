"""The chaos run waits for more than steps: a node whose lease has ended is as good as left out."""

from __future__ import annotations

from bagua_agent.etcd.keys import JobKeys
from bagua_contract.records import Generation, GenerationKind, Placement
from benchmarks.chaos_rest import judge

KEYS = JobKeys("chaos")


def standing(number: int, *agents: str) -> dict[str, bytes]:
    """A generation of agents a and b, with a leader, and the agents whose keys are there."""
    members = tuple(
        Placement(f"{agent}.0", agent, agent, 0, rank, 0, rank, "h:1", 1, 7, True)
        for rank, agent in enumerate(("a", "b"))
    )
    record = Generation(number, number - 1, GenerationKind.FAILOVER, members, "nonce", "")
    return {KEYS.leader: b"a", KEYS.generation: record.encode(), **{KEYS.agents + a: b"" for a in agents}}


def test_at_rest_in_the_generation_in_force_with_every_lease() -> None:
    found = standing(3, "a", "b")
    assert judge(KEYS, found, 3) == ""
    assert judge(KEYS, found, 2) == "generation 3 stands, 2 is in force"
    assert judge(KEYS, standing(3, "a"), 3) == "the lease of b has ended"
    assert judge(KEYS, {k: v for k, v in found.items() if k != KEYS.leader}, 3) == "no agent leads"
    assert judge(KEYS, {**found, KEYS.generation: b"\xff"}, 3).startswith("no generation:")
