"""Detection of members that certainly wait in different operations, and its message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.membership.disagreement import MemberWait, described, difference
from bagua_contract.collective_wait import MOST_OPERATIONS, CollectiveWait, Operation

STEP, END = "in the step's reductions", "at the end of training"
ALLREDUCE, BROADCAST = "in allreduce, sum of (3,)", "in broadcast from rank 0 of (5,)"


def waits(*operations: str, site: str = "train.py:9") -> CollectiveWait:
    """ "7 step", "7 allreduce": operations by the step before them, in order; the last is waited in."""
    names = {"step": STEP, "end": END, "allreduce": ALLREDUCE, "broadcast": BROADCAST}
    taken: dict[int, int] = {}
    found = []
    for operation in operations:
        step, name = operation.split()
        place = taken.get(int(step), 0)
        taken[int(step)] = place + 1
        found.append(Operation(int(step), place, names[name]))
    return CollectiveWait(site, tuple(found))


def told(*every: CollectiveWait | None) -> str | None:
    return difference(MemberWait(rank, wait) for rank, wait in enumerate(every))


@pytest.mark.parametrize(
    "every",
    [
        pytest.param([waits("7 step"), waits("7 step")], id="the same operation"),
        pytest.param([waits("7 step"), waits("7 step", "7 allreduce")], id="one is behind in the step"),
        pytest.param([waits("7 broadcast"), waits("7 broadcast", "8 step")], id="one is behind by a step"),
        pytest.param([waits("6 step", "7 allreduce"), waits("7 allreduce")], id="different memories"),
        pytest.param([waits("7 step"), None], id="one tells of no operation"),
        pytest.param([waits("7 step"), waits("8 step")], id="what one passed is not told any more"),
        pytest.param([], id="no member"),
    ],
)
def test_no_disagreement_is_found(every: list[CollectiveWait | None]) -> None:
    assert told(*every) is None and told(*reversed(every)) is None


@pytest.mark.parametrize(
    "every",
    [
        pytest.param([waits("7 allreduce"), waits("7 broadcast")], id="two operations at one place"),
        pytest.param(
            [waits("7 step", "7 allreduce"), waits("7 step", "8 step")], id="one more after the step"
        ),
        pytest.param([waits("7 step"), waits("7 end")], id="break"),
        pytest.param([waits("7 step"), waits("7 step"), waits("7 end")], id="break on one of three"),
    ],
)
def test_a_disagreement_is_found_in_either_order(every: list[CollectiveWait | None]) -> None:
    assert told(*every) is not None and told(*reversed(every)) is not None


def test_it_says_what_each_waits_in_and_where() -> None:
    said = told(
        waits("7 step", "7 allreduce", site="train.py:118"), waits("7 step", "8 step", site="train.py:93")
    )
    assert said == (
        "ranks disagree: rank 0 waits in allreduce, sum of (3,) (train.py:118); "
        "rank 1 waits in the step's reductions (train.py:93)"
    )


def test_many_ranks_are_said_in_groups_the_smallest_first() -> None:
    places = [MemberWait(rank, waits("7 step")) for rank in range(10)]
    said = described(places, {10: "ended with exit code 0 at step 7"})
    assert said == (
        "ranks disagree: rank 10 ended with exit code 0 at step 7; "
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: each waits in the step's reductions (train.py:9)"
    )


_SCRIPT = st.lists(
    st.tuples(st.sampled_from([STEP, ALLREDUCE, BROADCAST]), st.booleans()), min_size=1, max_size=12
)


def _numbered(script: list[tuple[str, bool]]) -> list[Operation]:
    """What a worker does that runs `script`; True: a commit follows the operation."""
    step, place, found = 3, 0, []
    for name, commits in script:
        found.append(Operation(step, place, name))
        step, place = (step + 1, 0) if commits else (step, place + 1)
    return found


@given(_SCRIPT, st.lists(st.integers(1, 12), min_size=2, max_size=5))
def test_members_that_run_alike_never_disagree(script: list[tuple[str, bool]], reached: list[int]) -> None:
    """However far each of them is, and whatever of its past it still tells."""
    operations = _numbered(script)
    places = [
        MemberWait(
            rank, CollectiveWait("s:1", tuple(operations[: min(n, len(operations))][-MOST_OPERATIONS:]))
        )
        for rank, n in enumerate(reached)
    ]
    assert difference(places) is None


@pytest.mark.parametrize("operations", [(), (Operation(2, 0, STEP), Operation(1, 0, STEP))])
def test_an_impossible_report_is_refused(operations: tuple[Operation, ...]) -> None:
    with pytest.raises(ValueError):
        CollectiveWait("s:1", operations)
