"""Members number common operations equally; operations of some members only are neither counted nor sent."""

from __future__ import annotations

from bagua_core.elastic.waiting.operation_trail import BOUNDARY, STEP, OperationTrail


def told(trail: OperationTrail) -> list[tuple[int, int, str]] | None:
    wait = trail.waits_in()
    return None if wait is None else [(o.step, o.place, o.name) for o in wait.operations]


def test_the_runtimes_waits_of_one_name_are_one_operation() -> None:
    trail = OperationTrail()
    trail.at(3)
    for name in (STEP, STEP, BOUNDARY):
        trail.wait_begins(name)
    assert told(trail) == [(3, 0, STEP), (3, 1, BOUNDARY)]


def test_a_collective_of_the_script_is_one_operation_however_often_it_waits() -> None:
    trail = OperationTrail()
    trail.at(3)
    trail.wait_begins()
    for _ in range(2):
        with trail.operation("in barrier"):
            trail.wait_begins()
            trail.wait_begins()
    trail.wait_begins()
    assert told(trail) == [(3, 0, STEP), (3, 1, "in barrier"), (3, 2, "in barrier"), (3, 3, STEP)]


def test_a_commit_begins_the_places_anew() -> None:
    trail = OperationTrail()
    trail.at(3)
    trail.wait_begins()
    trail.at(4)
    trail.wait_begins()
    assert told(trail) == [(3, 0, STEP), (4, 0, STEP)]


def test_what_some_of_the_members_do_takes_no_place_and_is_not_told() -> None:
    trail = OperationTrail()
    trail.at(3)
    trail.wait_begins()
    with trail.aside():
        trail.wait_begins()
        assert told(trail) is None
    trail.wait_begins()
    assert told(trail) == [(3, 0, STEP)]


def test_nothing_is_told_while_a_generation_is_entered() -> None:
    trail = OperationTrail()
    assert told(trail) is None
    trail.at(3)
    trail.wait_begins()
    trail.entering()
    trail.wait_begins()
    assert told(trail) is None


def test_the_call_site_is_the_script_s_line() -> None:
    trail = OperationTrail()
    trail.at(0)
    trail.wait_begins()
    wait = trail.waits_in()
    assert wait is not None and wait.call_site.startswith("test_operation_trail.py:")
