"""Every reachable state on the way to the first step keeps B1 to B5 and leads on; and each rule is needed for that.

`STATES` says how many states there were when this was written: a search that finds far fewer has lost events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from gathering_model import Exploration, Setup, Violation, explore

from bagua_agent.membership.view import JobView
from bagua_agent.node.live_workers import must_start_again
from bagua_contract.records import Generation, GenerationKind, Stage

SETUPS = {
    "a worker lost, a record missed": Setup((1, 1), kills=1, misses=1),
    "a worker lost, a node with two": Setup((2, 1), kills=1),
    "two workers lost": Setup((1, 1), kills=2),
    "two workers lost with checkpoints": Setup((1, 1), kills=2, checkpoints=True),
    "two workers lost with checkpoints, a record missed": Setup((1, 1), kills=2, misses=1, checkpoints=True),
    "a worker and a host lost": Setup((1, 1), kills=1, losses=1, misses=1),
    "a host lost with checkpoints": Setup((1, 1), kills=1, losses=1, checkpoints=True),
    "a host of the minimum lost": Setup((1, 1), losses=1, minimum=2),
    "one that asks for nothing, a worker lost": Setup((1, 1), kills=1, asks=(True, False)),
    "a host of three lost": Setup((1, 1, 1), losses=1),
}
STATES = {
    "two workers lost": 5_000,
    "two workers lost with checkpoints": 6_000,
    "a worker and a host lost": 12_000,
}
SITUATIONS = {
    "gathers",
    "gathers again",
    "starts again",
    "first generation",
    "committed",
    "all train",
    "the job failed",
    "below the minimum",
    "a late worker was answered",
    "an agent ends a worker that is ahead",
    "an agent missed a record",
    "a void answer ends its worker",
}

_seen: dict[str, Exploration] = {}


def explored(name: str) -> Exploration:
    if name not in _seen:
        _seen[name] = explore(SETUPS[name])
    return _seen[name]


@pytest.mark.parametrize("name", SETUPS)
def test_every_state_keeps_the_invariants_and_leads_on(name: str) -> None:
    found = explored(name)
    assert found.states >= STATES.get(name, 200)
    assert found.coverage["all train"]


def test_every_interesting_situation_was_met() -> None:
    coverage = sum((explored(name).coverage for name in SETUPS), Counter[str]())
    assert SITUATIONS - coverage.keys() == set()
    print(f"{sum(explored(name).states for name in SETUPS)} states")


# -- what breaks without a rule


def _ends_none(
    stage: Stage, worker_id: str, listed_in: int, gathering: Generation, *, answered: bool
) -> bool:
    return False


def _forgets_answers(
    stage: Stage, worker_id: str, listed_in: int, gathering: Generation, *, answered: bool
) -> bool:
    return must_start_again(stage, worker_id, listed_in, gathering)


def _part_of_a_node(record: Generation, view: JobView) -> Generation:
    return replace(record, members=record.members[:1]) if record.is_gathering else record


def _other_order(record: Generation, view: JobView) -> Generation:
    if record.is_gathering or record.base or not record.members:
        return record
    members = tuple(replace(m, global_rank=rank) for rank, m in enumerate(record.members[::-1]))
    return replace(record, members=members)


def _gathers_though_one_holds(record: Generation, view: JobView) -> Generation:
    if record.kind is not GenerationKind.FAILOVER or record.base == 0:
        return record
    return replace(record, kind=GenerationKind.GATHERING, base=0, members=())


def _holders_before_the_loop(record: Generation, view: JobView) -> Generation:
    if not record.is_gathering:
        return record
    return replace(record, members=tuple(replace(m, holder=True) for m in record.members))


MUTANTS = {
    "a gathering lists a part of a node": ("B1", Setup((2, 1), changed=_part_of_a_node)),
    "the first generation has ranks of its own": ("B2", Setup((1, 1), changed=_other_order)),
    "a gathering though a worker holds the state": (
        "B3",
        Setup((1, 1), kills=1, changed=_gathers_though_one_holds),
    ),
    "a worker before its loop counts as a holder": ("B5", Setup((1, 1), changed=_holders_before_the_loop)),
    "an agent ends no worker that is ahead": ("stuck|B", Setup((1, 1), kills=1, starts_again=_ends_none)),
    "an agent forgets which workers were answered": (
        "stuck|B4",
        Setup((1, 1), kills=2, checkpoints=True, starts_again=_forgets_answers),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_an_invariant_breaks(name: str) -> None:
    invariant, setup = MUTANTS[name]
    with pytest.raises(Violation, match=f"^({invariant})"):
        explore(setup)
