"""The restart plan of a hosted etcd: the pause before a start, its data, and when to give up."""

from __future__ import annotations

import pytest

from bagua_agent.etcd.server.restart_plan import (
    LONGEST_PAUSE_S,
    MOST_IN_VAIN,
    End,
    GiveUp,
    How,
    StartAgain,
    plan,
)

SERVED = End(How.KILLED, answered=True)


def vain(*hows: How) -> list[End]:
    return [End(how, answered=False) for how in hows]


@pytest.mark.parametrize("how", [How.KILLED, How.ENDED])
def test_at_once_and_on_its_data_after_it_had_served(how: How) -> None:
    assert plan([End(how, answered=True)]) == StartAgain(0.0, empty=False)


def test_pauses_double_up_to_a_bound() -> None:
    pauses = [plan([SERVED] * n) for n in range(1, 200)]
    assert [p.after_s for p in pauses[:6] if isinstance(p, StartAgain)] == [0.0, 0.2, 0.4, 0.8, 1.6, 3.2]
    assert {p.after_s for p in pauses[6:] if isinstance(p, StartAgain)} == {LONGEST_PAUSE_S}
    assert not any(isinstance(p, GiveUp) or p.empty for p in pauses), "a kill does not show bad data"


@pytest.mark.parametrize(
    ("ends", "empty"),
    [
        (vain(How.ENDED), True),
        ([End(How.ENDED, answered=True)], True),
        (vain(How.ENDED, How.KILLED), True),
        (vain(How.SILENT), False),
        (vain(How.SILENT, How.SILENT), True),
        (vain(How.NOT_STARTED, How.NOT_STARTED, How.NOT_STARTED), False),
        (vain(How.KILLED, How.KILLED), False),
    ],
)
def test_without_its_data_once_it_does_not_come_up_on_them(ends: list[End], empty: bool) -> None:
    decided = plan([SERVED, *ends])
    assert isinstance(decided, StartAgain)
    assert decided.empty is empty


def test_given_up_after_so_many_that_never_answered() -> None:
    ends = vain(*[How.NOT_STARTED] * MOST_IN_VAIN)
    assert isinstance(plan([SERVED, *ends[1:]]), StartAgain)
    assert plan([SERVED, *ends]) == GiveUp(MOST_IN_VAIN)
    assert isinstance(plan([SERVED, *ends[1:], SERVED]), StartAgain), "one that answered ends the row"
