"""Every reachable state of small jobs keeps the invariants, and each rule of the protocol is needed for that.

`STATES` says how many states there were when this was written: a search that finds far fewer has lost events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import replace

import model_state
import pytest
from exploration import Exploration, explore
from model_state import Lines, Rules, Setup, Violation

from bagua_core.elastic.membership import switch_pair
from bagua_core.elastic.state.commit_history import History, Line, Roster
from bagua_core.elastic.step.step_states import TRANSITIONS, Event, Phase

SETUPS = {
    "two losses of three": Setup(kills=2, steps=3),
    "two losses of three, behind copies beside": Setup(kills=2, steps=3, behind_beside=True),
    "two losses of three, all outside": Setup(kills=2, steps=2, outside=True),
    "two losses before anybody has rank 0's parameters": Setup(kills=2, steps=1, unequal_start=True),
    "a join and a loss of three": Setup(kills=1, steps=1, newcomer=True, stop_at_end=True),
    "a join and a loss of two": Setup(workers=2, steps=3, kills=1, newcomer=True, stop_at_end=True),
    "a join and two losses of two": Setup(workers=2, kills=2, newcomer=True, stop_at_end=True),
    "a join and a loss outside steps": Setup(
        workers=2, kills=1, newcomer=True, outside=True, stop_at_end=True
    ),
    "a loss below the minimum": Setup(kills=1, minimum=3),
    "two losses of two": Setup(workers=2, kills=2, steps=3),
    "a join to the minimum": Setup(kills=1, steps=1, minimum=3, newcomer=True, stop_at_end=True),
    "a loss between two sizes": Setup(kills=2, sizes=(1, 3)),
    "two losses, and a spare for the next size": Setup(
        kills=2, steps=1, sizes=(1, 3), newcomer=True, stop_at_end=True
    ),
    "a leave and a loss": Setup(kills=1, leavers=0b100, stop_at_end=True),
    "a leave, a join and a loss": Setup(workers=2, kills=1, leavers=0b001, newcomer=True, stop_at_end=True),
    "a wrong drop": Setup(kills=0, wrong_drops=1, stop_at_end=True),
    "a wrong drop and a loss": Setup(kills=1, steps=1, wrong_drops=1, stop_at_end=True),
}
LARGEST = {"a wrong drop and a loss", "a join and a loss of three", "a leave, a join and a loss"}
"""Half of all states, and no situation that the others do not have."""
STATES = {
    "two losses of three": 20_000,
    "a join and a loss of three": 60_000,
    "a join and two losses of two": 40_000,
    "a wrong drop and a loss": 100_000,
}
SITUATIONS = {
    "a rank confirmed the end",
    "the job ended",
    "no holder is known alive",
    "below the minimum",
    "everyone is gone",
    "copied",
    "copied initial parameters",
    "last bytes of a source that died",
    "reduced, but the copy broke",
    "holder went on while a copy broke",
    "failed what others completed",
    "loss generation with the same members",
    "switched although a member died",
    "superseded a pending generation",
    "switched to a superseded generation",
    "left with the switch",
    "leaver gone without its last step",
    "dropped a living worker",
    "a survivor is left out",
    "spares complete a size",
    "a dropped worker joins again",
    "forgot what the job may have undone",
    "line written for another",
    "died between two lines",
}

_seen: dict[str, Exploration] = {}


def explored(name: str) -> Exploration:
    if name not in _seen:
        _seen[name] = explore(SETUPS[name])
    return _seen[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LARGEST else name for name in SETUPS]
)
def test_every_state_keeps_the_invariants(name: str) -> None:
    found = explored(name)
    assert found.states >= STATES.get(name, 300)
    assert found.coverage["a rank confirmed the end"]


def test_every_interesting_situation_was_met() -> None:
    found = [explored(name) for name in SETUPS if name not in LARGEST]
    coverage = sum((exploration.coverage for exploration in found), Counter[str]())
    assert SITUATIONS - coverage.keys() == set()
    print(f"{sum(e.states for e in found)} states, {sum(e.transitions for e in found)} events")


@pytest.mark.parametrize(
    "setup",
    [
        Setup(kills=2),
        Setup(workers=2, steps=1, kills=2, newcomer=True, stop_at_end=True),
        Setup(workers=2, kills=1, wrong_drops=1, stop_at_end=True),
    ],
    ids=["losses", "join", "wrong drop"],
)
def test_events_that_go_first_hide_no_outcome(setup: Setup) -> None:
    assert explore(setup).outcomes == explore(replace(setup, eager=False)).outcomes


# -- what breaks without a rule


def _release_while_somebody_heals(
    history: History, step: int, healing: Set[int], me: str, roster: Roster
) -> tuple[History, Lines]:
    return history.collective_completed(step, frozenset(), me, roster)


def _own_only(lines: Lines, me: str) -> Lines:
    return tuple(line for line in lines if line.entry.workers[line.global_rank] == me)


def _release_own_only(
    history: History, step: int, healing: Set[int], me: str, roster: Roster
) -> tuple[History, Lines]:
    history, lines = history.collective_completed(step, healing, me, roster)
    return history, _own_only(lines, me)


def _lines_of_the_gone_at_once(history: History, me: str, roster: Roster) -> Lines:
    """What "when a generation no longer has a rank, every holder writes that rank's line" would mean."""
    return tuple(
        Line(k.entry, rank)
        for k in history.kept
        for rank, worker_id in enumerate(k.entry.workers)
        if worker_id not in roster
    )


def _anybody_switches(pair: tuple[float, float], world_size: int) -> int | None:
    return switch_pair.agreed(pair, world_size) or (1 if pair[0] else None)


MUTANTS = {
    "the line is written at the commit": (
        "I1",
        Setup(kills=1, rules=Rules(own_line_at_commit=True)),
    ),
    "a reduction with a healing worker releases": (
        "I1",
        Setup(
            kills=2,
            steps=3,
            behind_beside=True,
            rules=Rules(collective_completed=_release_while_somebody_heals),
        ),
    ),
    "no rank writes for a lost rank that had completed": (
        "I2",
        Setup(kills=1, rules=Rules(entered=lambda *_: ())),
    ),
    "no rank writes for a lost rank at the release": (
        "I2",
        Setup(kills=1, rules=Rules(collective_completed=_release_own_only)),
    ),
    "a healed rank does not write what the holder released": (
        "I2",
        Setup(kills=2, steps=3, rules=Rules(copied=lambda history, *_: (history, ()))),
    ),
    "lines of the gone are written before the step is with everyone": (
        "I1",
        Setup(kills=2, rules=Rules(entered=_lines_of_the_gone_at_once)),
    ),
    "two steps are kept, with any worker healing": (
        "I2",
        Setup(
            workers=2,
            steps=3,
            kills=2,
            newcomer=True,
            behind_beside=True,
            stop_at_end=True,
            rules=Rules(trim=lambda history: History(history.kept[-2:])),
        ),
    ),
    "one rank's word is enough to switch": (
        "stuck",
        Setup(kills=0, newcomer=True, stop_at_end=True, rules=Rules(agreed=_anybody_switches)),
    ),
    "a generation needs no holder": (
        "I1",
        Setup(workers=2, kills=2, newcomer=True, stop_at_end=True, rules=Rules(holder_required=False)),
    ),
    "carrying over makes a holder": (
        "I6",
        Setup(workers=2, kills=2, newcomer=True, stop_at_end=True, rules=Rules(holder_by_carrying_over=True)),
    ),
    "only a reported commit counts as one": (
        "I1",
        Setup(
            workers=1,
            kills=1,
            newcomer=True,
            stop_at_end=True,
            rules=Rules(first_commit_known_by_report=True),
        ),
    ),
    "a commit before the drop makes a holder": (
        "I6",
        Setup(workers=2, kills=1, wrong_drops=1, stop_at_end=True, rules=Rules(holder_by_any_commit=True)),
    ),
    "a worker left out by a pending record holds the state, if no other does": (
        "I1",
        Setup(steps=3, kills=2, leavers=0b100, stop_at_end=True, rules=Rules(base_holds="always")),
    ),
    "a worker left out by a pending record holds the state, together with newcomers": (
        "I1",
        Setup(
            workers=2,
            steps=2,
            kills=1,
            leavers=0b10,
            newcomer=True,
            outside=True,
            stop_at_end=True,
            rules=Rules(base_holds="with newcomers"),
        ),
    ),
    "a planned generation follows one that not all have entered": (
        "stuck",
        Setup(kills=1, newcomer=True, stop_at_end=True, rules=Rules(planned_needs_in_force=False)),
    ),
    "a loss leaves a number between two sizes": (
        "size",
        Setup(kills=1, sizes=(1, 3), rules=Rules(loss_shrinks_to_a_size=False)),
    ),
    "one collective ends the job": (
        "I2",
        Setup(kills=1, rules=Rules(second_end_collective=False)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_an_invariant_breaks(name: str) -> None:
    invariant, setup = MUTANTS[name]
    with pytest.raises(Violation, match=f"^{invariant}"):
        explore(setup)


@pytest.mark.parametrize(
    "missing",
    [
        (Phase.RUNNING, Event.REDUCE),
        (Phase.RUNNING, Event.FAIL),
        (Phase.FINAL, Event.COMMIT),
        (Phase.FAILED, Event.ROLL_BACK),
    ],
    ids=lambda key: f"{key[0].value}, {key[1].value}",
)
def test_the_model_goes_by_the_engine_s_table_of_a_step(
    missing: tuple[Phase, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an entry of the table the exploration meets a step that cannot go on."""
    rest = {key: after for key, after in TRANSITIONS.items() if key != missing}
    monkeypatch.setattr(model_state, "TRANSITIONS", rest)
    model_state.step_after.cache_clear()
    try:
        with pytest.raises(Violation, match=f"a step that is {missing[0].value} cannot {missing[1].value}"):
            explore(Setup(workers=2, kills=1))
    finally:
        model_state.step_after.cache_clear()


def test_a_dropped_worker_that_kept_its_name_would_bring_back_an_undone_step() -> None:
    """Two wrong drops and a loss: too many states to search from the start, so a prefix leads the way."""
    setup = Setup(
        steps=2, kills=1, wrong_drops=2, minimum=2, outside=True, rules=Rules(forget_when_dropped=False)
    )
    prefix = (
        *(f"{w} contributes to round 1 of 1" for w in "abc"),
        "a completes round 1 of 1",
        "leader writes loss 2 = bc wrongly",
        *(f"{w} enters 2" for w in "bc"),
        *(f"{w} completes round 0 of 2" for w in "bc"),
        "c has copied in 2",
        *(f"{w} contributes to round 1 of 2" for w in "bc"),
        "c completes round 1 of 2",
        "leader writes loss 3 = ba wrongly",
    )
    with pytest.raises(Violation, match=r"^I[13]"):
        explore(setup, prefix=prefix)
    explore(replace(setup, rules=Rules(), stop_at_end=True), prefix=prefix)
