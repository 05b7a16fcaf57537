"""The keys that an agent follows: all, or in a large job those that concern every agent."""

from __future__ import annotations

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.limits import PICTURE_VARIABLE, RECORD_VARIABLE, Limits
from bagua_agent.large_jobs.scope import Scope, ScopeSituation, ranges_of, scope_of

LIMITS = Limits()
KEYS = JobKeys("job")


def situation(
    nodes: int = 2,
    *,
    leads: bool = False,
    hosts: bool = False,
    strange: bool = False,
    was: Scope = Scope.WHOLE,
) -> ScopeSituation:
    return ScopeSituation(leads, hosts, strange, nodes, was)


@pytest.mark.parametrize("was", list(Scope))
@pytest.mark.parametrize("nodes", [0, 64, 65, 4096])
def test_an_agent_that_leads_or_hosts_or_doubts_sees_all(nodes: int, was: Scope) -> None:
    for now in (
        situation(nodes, leads=True, was=was),
        situation(nodes, hosts=True, was=was),
        situation(nodes, strange=True, was=was),
    ):
        assert scope_of(now, LIMITS)[0] is Scope.WHOLE


def test_the_others_of_a_large_job_see_the_leaders_word() -> None:
    limit = LIMITS.whole_picture_nodes
    assert scope_of(situation(limit), LIMITS)[0] is Scope.WHOLE
    scope, why = scope_of(situation(limit + 1), LIMITS)
    assert scope is Scope.OWN and str(limit + 1) in why


def test_an_agent_that_sees_part_does_not_go_back_and_forth() -> None:
    """It cannot count what it does not see."""
    assert scope_of(situation(0, was=Scope.OWN), LIMITS)[0] is Scope.OWN
    assert scope_of(situation(3, was=Scope.OWN), LIMITS)[0] is Scope.OWN


def test_what_is_followed() -> None:
    def followed(scope: Scope, key: str) -> bool:
        return any(key in keys for keys in ranges_of(scope, KEYS, "a"))

    everybodys = [KEYS.spec, KEYS.desired, KEYS.leader, KEYS.generation, KEYS.meeting, KEYS.hang]
    everybodys += [KEYS.closing, KEYS.result, KEYS.refused("a.0.1")]
    others = [KEYS.agent("b"), KEYS.member("b.0.1"), KEYS.suspicion("b.0.1"), KEYS.failure("b.0.1")]
    others += [KEYS.finished("b.0.1"), KEYS.refused("b.0.1"), KEYS.refused("ab.0.1"), KEYS.event("e")]
    for key in everybodys + others:
        assert followed(Scope.WHOLE, key)
    assert all(followed(Scope.OWN, key) for key in everybodys)
    assert not any(followed(Scope.OWN, key) for key in others)
    for scope in Scope:
        assert not followed(scope, KEYS.record_part("folder", 0)), "parts are read, not followed"
        assert not followed(scope, JobKeys("job2").generation)


def test_leases_grow_with_the_job_and_never_shrink() -> None:
    assert LIMITS.lease_ttl_s(3.0, 1) == LIMITS.lease_ttl_s(3.0, LIMITS.nodes_of_a_lease) == 3.0
    assert LIMITS.lease_ttl_s(3.0, 8 * LIMITS.nodes_of_a_lease) == 24.0


def test_few_ask_after_the_leader_at_once_and_all_in_the_end() -> None:
    assert {LIMITS.turn_s(f"n{i}", LIMITS.asking_at_once) for i in range(99)} == {0.0}
    nodes = 4096
    turns = [LIMITS.turn_s(f"n{i}", nodes) for i in range(nodes)]
    first = sum(t == 0.0 for t in turns)
    assert 1 <= first <= 2 * LIMITS.asking_at_once
    assert max(turns) <= nodes / LIMITS.asking_at_once * LIMITS.next_asking_after_s


def test_only_large_jobs_gather_and_never_for_long() -> None:
    small, large = LIMITS.whole_picture_nodes, LIMITS.whole_picture_nodes + 1
    assert LIMITS.gathering_s(10.0, small) == 0.0, "a small job decides at once, however slow its machine"
    assert LIMITS.gathering_s(0.01, large) == pytest.approx(0.01 * LIMITS.gathered_for_deciding)
    assert LIMITS.gathering_s(10.0, large) == LIMITS.longest_gathering_s


def test_the_environment_lowers_the_limits_for_tests() -> None:
    limits = Limits.from_environment({PICTURE_VARIABLE: "0", RECORD_VARIABLE: "1"})
    assert (limits.whole_picture_nodes, limits.whole_record_members) == (0, 1)
    assert Limits.from_environment({}) == Limits()
    with pytest.raises(UserError, match=r"BAGUA_WHOLE_PICTURE_NODES is '-1'"):
        Limits.from_environment({PICTURE_VARIABLE: "-1"})
