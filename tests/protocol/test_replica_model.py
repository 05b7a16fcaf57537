"""Every reachable state of a job of replicas keeps A1 to A5, I1 and I6 and leads on; each rule is needed for that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from replica_model import Exploration, Setup, Violation, explore

from bagua_agent.membership import job_condition
from bagua_agent.membership.formation import targets
from bagua_agent.membership.formation.replicas import ReplicaChanges
from bagua_agent.membership.replica_groups import Groups
from bagua_agent.membership.view import MemberView
from bagua_contract.records import Generation

SETUPS = {
    "two killed of one replica across nodes": Setup((1, 1), kills=2),
    "two killed, with checkpoints": Setup((1, 1), kills=2, checkpoints=True),
    "one killed of two replicas, one a node": Setup((2, 2), kills=1),
    "a host of two lost": Setup((2, 2), losses=1),
    "one killed beside a spare, from the start": Setup((1, 1, 1), kills=1, at_once=False),
    "a host lost beside a spare": Setup((1, 1, 1), losses=1),
    "one killed and a host lost beside a spare": Setup((1, 1, 1), kills=1, losses=1),
    "one killed below the minimum": Setup((2, 2), kills=1, minimum=2),
    "a host of the minimum lost": Setup((2, 2), losses=1, minimum=2),
}
STATES = {
    "one killed of two replicas, one a node": 15_000,
    "one killed and a host lost beside a spare": 7_500,
}
SITUATIONS = {
    "a replica is formed",
    "a replica is over",
    "a record is forgotten",
    "an agent kills a worker of a replica that is over",
    "planned of 2",
    "planned of 4",
    "failover of 2",
    "committed",
    "all train",
    "a spare is left over",
    "below the minimum",
    "the job failed",
}

_seen: dict[str, Exploration] = {}


def explored(name: str) -> Exploration:
    if name not in _seen:
        _seen[name] = explore(SETUPS[name])
    return _seen[name]


@pytest.mark.parametrize("name", SETUPS)
def test_every_state_keeps_the_invariants_and_leads_on(name: str) -> None:
    found = explored(name)
    assert found.states >= STATES.get(name, 100)
    assert found.coverage["committed"]


def test_every_interesting_situation_was_met() -> None:
    coverage = sum((explored(name).coverage for name in SETUPS), Counter[str]())
    assert SITUATIONS - coverage.keys() == set()
    print(f"{sum(explored(name).states for name in SETUPS)} states")


# -- what breaks without a rule


def _part(record: Generation) -> Generation:
    return replace(record, members=record.members[:1]) if record.members else record


def _never_over(changes: ReplicaChanges) -> ReplicaChanges:
    return replace(changes, over=())


def _forgets_all(changes: ReplicaChanges) -> ReplicaChanges:
    return replace(changes, forgotten=tuple(r.replica_id for r in changes.over), over=())


MUTANTS = {
    "a generation lists part of a replica": ("A1", Setup((1, 1), changed=_part)),
    "no replica is over": ("stuck", Setup((1, 1), kills=1, changed_replicas=_never_over)),
    "the record is removed at once instead": ("stuck", Setup((1, 1), kills=1, changed_replicas=_forgets_all)),
    "agents kill none": ("stuck", Setup((1, 1), kills=1, kills_on_over=False)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_an_invariant_breaks(name: str) -> None:
    invariant, setup = MUTANTS[name]
    with pytest.raises(Violation, match=f"^{invariant}"):
        explore(setup)


def test_a_worker_without_its_replica_must_not_count_as_present(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(raw: dict[str, MemberView], known: Groups) -> dict[str, MemberView]:
        return {w: replace(m, replica=known.of[w]) for w, m in raw.items() if w in known.of}

    monkeypatch.setattr(job_condition, "present_as_whole", each)
    monkeypatch.setattr(targets, "_whole", lambda workers: workers)
    with pytest.raises((Violation, KeyError)):
        explore(SETUPS["one killed of two replicas, one a node"])
