"""Settings of steps reach the members with a generation, and cost no membership."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pictures import FAILOVER, LEADER, PLANNED, agent, decided, member, picture, record
from pictures import written as generation_of

from bagua_agent.membership import events as ev
from bagua_agent.membership.state_machine.picture import absorb
from bagua_agent.membership.view import JobView
from bagua_contract.records import Generation, GenerationKind
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

SMALL = StepSettings(bucket_bytes=1 << 16)


def written(view: JobView) -> Generation:
    return generation_of(decided(view))


def trains(committed: int, number: int = 3, **more: Any) -> JobView:
    workers = [member("a0", committed=committed), member("b0", committed=committed)]
    return picture([agent("a"), agent("b")], workers, record(number, "a0 b0"), **more)


def test_other_settings_are_a_planned_generation_of_the_same_members() -> None:
    view = trains(committed=3, pinned_settings=SMALL)
    found = written(view)
    assert (found.number, found.kind, found.base, found.settings) == (4, PLANNED, 3, SMALL)
    assert view.generation is not None
    assert [m.worker_id for m in found.members] == [m.worker_id for m in view.generation.members]
    assert "other settings of steps: buckets of 64 KiB" in found.reason


def test_nothing_follows_while_they_are_as_wanted() -> None:
    view = trains(committed=3, pinned_settings=SMALL)
    assert view.generation is not None
    view = replace(view, generation=replace(view.generation, settings=SMALL))
    assert decided(view).action is None
    assert written(replace(view, pinned_settings=AS_SCRIPTED)).settings == AS_SCRIPTED


def test_they_wait_until_the_newest_record_is_known_to_be_in_force() -> None:
    """Else a member could stay in a generation that the others have left, with its settings."""
    decision = decided(trains(committed=2, pinned_settings=SMALL))
    assert decision.action is None and "no worker has committed in generation 3" in decision.reason


def test_a_joiner_comes_with_them_in_one_generation() -> None:
    workers = [member("a0", committed=3), member("b0")]
    view = picture([agent("a"), agent("b")], workers, record(3, "a0"), pinned_settings=SMALL)
    found = written(view)
    assert len(found.members) == 2 and found.settings == SMALL and "adds host-b" in found.reason


def test_a_failover_generation_has_them() -> None:
    view = picture([agent("a")], [member("a0", committed=3)], record(3, "a0 b0"), pinned_settings=SMALL)
    found = written(view)
    assert (found.kind, found.settings) == (FAILOVER, SMALL)


def test_they_survive_the_leader() -> None:
    """Every agent has them from the store."""
    seen, _, note = absorb(JobView(), LEADER, ev.SettingsPinned(now_s=1.0, settings=SMALL), 1)
    assert (seen.settings, note) == (SMALL, "")


def test_the_first_generation_has_them() -> None:
    view = picture([agent("a")], [member("a0")], None, nodes=(1, 1), pinned_settings=SMALL)
    assert (written(view).number, written(view).settings) == (1, SMALL)
    assert written(view).kind is GenerationKind.PLANNED
