"""A model is cut evenly, fragments take their turns at equal distances, and weights become shares."""

from __future__ import annotations

import pytest

from bagua_core.communication.weights.fragment_schedule import Action, Schedule, cut, shares_of


def test_every_tensor_is_in_one_fragment_and_fragments_are_about_equal() -> None:
    sizes = [400, 8, 100, 100, 300, 8, 50, 250]
    parts = cut(sizes, 3)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in part) for part in parts]
    assert max(filled) - min(filled) <= 50, filled
    assert cut(sizes, 3) == parts
    assert all(list(part) == sorted(part) for part in parts)


@pytest.mark.parametrize(
    ("sizes", "count", "parts"),
    [
        ([5], 4, ((0,),)),
        ([1, 9], 4, ((1,), (0,))),
        ([0, 0, 0], 2, ((0, 2), (1,))),
        ([4, 4, 4, 4], 2, ((0, 2), (1, 3))),
    ],
)
def test_small_models(sizes: list[int], count: int, parts: tuple[tuple[int, ...], ...]) -> None:
    assert cut(sizes, count) == parts


def test_fragments_are_sent_in_turns_and_applied_after_the_delay() -> None:
    schedule, clocks = Schedule(sync_every=6, count=3, delay=2), [0, 0, 0]
    sent: list[int | None] = [None] * 3
    done = []
    for step in range(15):
        for fragment in range(3):
            action = schedule.decide(fragment, step, clocks[fragment], sent[fragment]).action
            if action is Action.SEND:
                sent[fragment] = step
            elif action is Action.APPLY:
                at, sent[fragment] = sent[fragment], None
                assert at is not None
                clocks[fragment] = at
            if action is not Action.NOTHING:
                done.append((step, fragment, action.value))
    sends = [(step, fragment) for step, fragment, action in done if action == "send"]
    assert sends == [(2, 1), (4, 2), (6, 0), (8, 1), (10, 2), (12, 0), (14, 1)]
    applied = [(step - 2, fragment) for step, fragment, action in done if action == "apply"]
    assert applied == sends[:-1], "each two steps later"


@pytest.mark.parametrize(
    ("step", "clock", "sent", "action", "reason"),
    [
        (9, 6, None, Action.NOTHING, "its last exchange was sent in step 6"),
        (12, 6, None, Action.SEND, "due since the exchange of step 6"),
        (15, 6, None, Action.SEND, "due since the exchange of step 6"),  # dropped, or another worker healed
        (17, 15, None, Action.NOTHING, "not due"),
        (18, 15, None, Action.SEND, "due"),  # its usual place again
        (13, 6, 12, Action.NOTHING, "to be applied in step 14"),
        (14, 6, 12, Action.APPLY, "sent in step 12"),
        (19, 6, 12, Action.APPLY, "sent in step 12"),
    ],
)
def test_decisions(step: int, clock: int, sent: int | None, action: Action, reason: str) -> None:
    decision = Schedule(6, 3, 2).decide(0, step, clock, sent)
    assert decision.action is action and reason in decision.reason


def test_an_exchange_without_delay_is_applied_in_the_step_that_sends_it() -> None:
    schedule = Schedule(1, 1, 0)
    assert schedule.decide(0, 1, 0, None).action is Action.SEND
    assert schedule.decide(0, 1, 0, 1).action is Action.APPLY


def test_shares() -> None:
    assert shares_of([1.0, 0.0, 3.0]) == [0.25, 0.0, 0.75]
    assert shares_of([0.0, 0.0]) == [0.5, 0.5]
