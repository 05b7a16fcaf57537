"""The next move of a worker, situation by situation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract.records import Generation, GenerationKind
from bagua_core.elastic.membership.following import FollowingSituation, Move, NextMove, decide, is_superseded
from tests.core.elastic.records import generation, loss

ME = "me"
G3 = generation(3, ME, "peer")
NEXT = generation(4, ME, "peer", "new", since={ME: 1, "peer": 1})
AFTER = generation(5, ME, "peer", "new", "newer", base=3, since={ME: 1, "peer": 1})
WITHOUT_ME = generation(4, "peer")
MISSED = generation(5, ME, "peer", base=4)  # says that this worker was in generation 4
MISSED_NEW = generation(5, ME, "peer", base=4, since={"peer": 1})
MISSED_WITHOUT_ME = generation(5, "peer", base=4)
JOINING = generation(4, ME, "peer", since={"peer": 1})
FAILOVER = loss(5, ME)
LOSS_WITHOUT_ME = loss(5, "peer")
LOSS_AS_NEW = generation(5, ME, "peer", kind=GenerationKind.FAILOVER, since={"peer": 1})
LOSS_AS_OLD = generation(5, ME, "peer", kind=GenerationKind.FAILOVER, since={ME: 3, "peer": 1})


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    situation: FollowingSituation
    move: Move
    towards: Generation | None = None


def case(
    what: str,
    move: Move,
    towards: Generation | None = None,
    *,
    current: Generation | None = G3,
    newest: Generation | None = G3,
    broken: bool = False,
    agreed: Generation | None = None,
    floor: int = 0,
    leaving: bool = False,
    closed: bool = False,
) -> Case:
    return Case(
        what, FollowingSituation(ME, current, broken, agreed, newest, floor, leaving, closed), move, towards
    )


CASES = [
    # a member whose generation works
    case("nothing new", Move.STAY),
    case("no record was seen again yet", Move.STAY, newest=None),
    case("a planned record is pending", Move.STAY, newest=NEXT),
    case("a planned record would leave it out, but is not agreed", Move.STAY, newest=WITHOUT_ME),
    case("the node leaves, but the others still count on it", Move.STAY, leaving=True),
    case("the job is closing, the last generation goes on", Move.STAY, closed=True),
    case("an older loss comes late", Move.STAY, newest=loss(2, ME)),
    case("the loss it is in already", Move.STAY, current=FAILOVER, newest=FAILOVER),
    # agreed
    case("all brought the pending one", Move.ENTER, NEXT, newest=NEXT, agreed=NEXT),
    case("agreed, while a newer planned one appeared", Move.ENTER, NEXT, newest=AFTER, agreed=NEXT),
    case("agreed to go on without it", Move.STEP_OUT, WITHOUT_ME, newest=WITHOUT_ME, agreed=WITHOUT_ME),
    case(
        "leaving, agreed to go on without it",
        Move.STEP_OUT,
        WITHOUT_ME,
        newest=WITHOUT_ME,
        agreed=WITHOUT_ME,
        leaving=True,
    ),
    case("agreed on one it failed to enter", Move.WAIT, newest=NEXT, agreed=NEXT, floor=4),
    case(
        "broken after all agreed: no further step can be done in it",
        Move.WAIT,
        newest=NEXT,
        agreed=NEXT,
        broken=True,
    ),
    # a loss is taken at once
    case("a loss", Move.ENTER, FAILOVER, newest=FAILOVER),
    case("a loss beats what was agreed", Move.ENTER, FAILOVER, newest=FAILOVER, agreed=NEXT),
    case("a loss mends what is broken", Move.ENTER, FAILOVER, newest=FAILOVER, broken=True),
    case(
        "a loss counts while the job closes", Move.ENTER, FAILOVER, newest=FAILOVER, broken=True, closed=True
    ),
    case("a loss leaves it out", Move.STEP_OUT, LOSS_WITHOUT_ME, newest=LOSS_WITHOUT_ME),
    case(
        "a loss leaves it out of what was agreed",
        Move.STEP_OUT,
        LOSS_WITHOUT_ME,
        newest=LOSS_WITHOUT_ME,
        agreed=NEXT,
    ),
    case("a loss that it failed to enter", Move.WAIT, newest=FAILOVER, broken=True, floor=5),
    case(
        "a loss after the one that it failed to enter",
        Move.ENTER,
        FAILOVER,
        newest=FAILOVER,
        broken=True,
        floor=4,
    ),
    # a loss in between was missed: it dropped this worker, and a later one took it back as a new one
    case("a later loss calls it new", Move.STEP_OUT, LOSS_AS_NEW, newest=LOSS_AS_NEW),
    case("the same, broken as it is", Move.STEP_OUT, LOSS_AS_NEW, newest=LOSS_AS_NEW, broken=True),
    case("the same, whatever was agreed", Move.STEP_OUT, LOSS_AS_NEW, newest=LOSS_AS_NEW, agreed=NEXT),
    case("the same, although it could not enter it", Move.STEP_OUT, LOSS_AS_NEW, newest=LOSS_AS_NEW, floor=5),
    case("a later loss that always had it", Move.ENTER, LOSS_AS_OLD, newest=LOSS_AS_OLD, broken=True),
    case(
        "after it stepped out it comes in by the same record",
        Move.ENTER,
        LOSS_AS_NEW,
        current=None,
        newest=LOSS_AS_NEW,
    ),
    # broken
    case("broken, nothing new", Move.WAIT, broken=True),
    case("broken, a planned record does not mend it", Move.WAIT, newest=NEXT, broken=True),
    case("broken while leaving: its state may be the last", Move.WAIT, broken=True, leaving=True),
    case("broken while the job closes: nothing follows", Move.END, broken=True, closed=True),
    # a record was missed
    case("a planned one follows one that listed it", Move.REPORT_MISSED, MISSED, newest=MISSED),
    case("a planned one follows one that it was not in", Move.STEP_OUT, MISSED_NEW, newest=MISSED_NEW),
    case("a planned one without it follows", Move.STEP_OUT, MISSED_WITHOUT_ME, newest=MISSED_WITHOUT_ME),
    case(
        "a newcomer that a planned record calls an old member",
        Move.REPORT_MISSED,
        MISSED,
        current=None,
        newest=MISSED,
    ),
    # a newcomer
    case("no generation lists it", Move.WAIT, current=None, newest=None),
    case("the newest does not list it", Move.WAIT, current=None, newest=WITHOUT_ME),
    case("planned with it", Move.ENTER, JOINING, current=None, newest=JOINING),
    case("a loss takes it in", Move.ENTER, FAILOVER, current=None, newest=FAILOVER),
    case("one that it failed to enter", Move.WAIT, current=None, newest=FAILOVER, floor=5),
    case("one after that", Move.ENTER, FAILOVER, current=None, newest=FAILOVER, floor=4),
    case(
        "listed although the node leaves: the others wait for it",
        Move.ENTER,
        FAILOVER,
        current=None,
        newest=FAILOVER,
        leaving=True,
    ),
    case("listed although the job closes", Move.ENTER, FAILOVER, current=None, newest=FAILOVER, closed=True),
    case(
        "the node leaves and no generation lists it", Move.END, current=None, newest=WITHOUT_ME, leaving=True
    ),
    case("the node leaves before any record", Move.END, current=None, newest=None, leaving=True),
    case("the job closes and no generation lists it", Move.END, current=None, newest=WITHOUT_ME, closed=True),
    case(
        "the job closes, and the one that lists it can't be entered",
        Move.END,
        current=None,
        newest=FAILOVER,
        floor=5,
        closed=True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.what)
def test_where_it_goes(case: Case) -> None:
    decision = decide(case.situation)
    assert decision.move is case.move, decision.reason
    if case.towards is not None:
        assert decision.generation is case.towards
    assert decision.reason


RECORDS = st.builds(
    lambda number, kind, workers: kind(number, *workers),
    st.integers(1, 6),
    st.sampled_from([generation, loss]),
    st.lists(st.sampled_from([ME, "peer", "new"]), unique=True),
)
MINE = RECORDS.filter(lambda g: g.placement_of(ME) is not None)


@given(
    st.builds(
        FollowingSituation,
        worker_id=st.just(ME),
        current=st.none() | MINE,
        broken=st.booleans(),
        agreed=st.none() | RECORDS,
        newest=st.none() | RECORDS,
        floor=st.integers(0, 6),
        leaving=st.booleans(),
        closed=st.booleans(),
    )
)
def test_whatever_the_situation(situation: FollowingSituation) -> None:
    decision: NextMove = decide(situation)
    if decision.move is Move.ENTER:
        target = decision.generation
        assert target is not None and target.placement_of(ME) is not None
        assert target.number > situation.floor
        assert target in (situation.newest, situation.agreed)
    if decision.move is Move.STEP_OUT:
        assert situation.current is not None, "only who is in can step out"
    if decision.move is Move.STAY:
        assert situation.current is not None and not situation.broken
    if decision.move is Move.END:
        assert situation.closed or situation.leaving


@pytest.mark.parametrize(
    ("newest", "newcomer", "superseded"),
    [
        (None, True, False),
        (None, False, False),
        (NEXT, True, False),  # the same one
        (G3, True, False),  # a late one
        (AFTER, True, True),
        (AFTER, False, False),  # a planned one cannot have been agreed without this member
        (FAILOVER, True, True),
        (FAILOVER, False, True),
        (LOSS_WITHOUT_ME, False, True),
        (loss(4, ME), False, False),
        (generation(6, ME, "peer", base=5), False, True),  # it follows a loss that was missed
        (generation(6, ME, "peer", base=4), False, False),
    ],
)
def test_what_ends_an_entry(newest: Generation | None, newcomer: bool, superseded: bool) -> None:
    assert is_superseded(NEXT, newest, newcomer=newcomer) is superseded
