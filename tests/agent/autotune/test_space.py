"""The settings that a study may try follow from the model, the nodes, and what people pinned and allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.autotune.space import Facts, space_of
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

FACTS = st.builds(
    Facts,
    gradient_bytes=st.integers(0, 1 << 34),
    order=st.integers(0, 5).flatmap(lambda n: st.permutations(range(n))).map(tuple),
    crosses=st.booleans(),
    algorithms=st.sampled_from([(), ("bytegrad",)]),
    pinned=st.sampled_from([AS_SCRIPTED, StepSettings(bucket_bytes=4096), StepSettings(hierarchical=True)]),
)


@given(FACTS)
def test_every_point_is_a_setting_of_its_own(facts: Facts) -> None:
    space = space_of(facts)
    found = [space.settings_at(point) for point in space.points()]
    assert len(set(found)) == len(found) == space.size
    assert [space.point_of(settings) for settings in found] == list(space.points())
    assert set(space.first_points()) <= set(space.points())
    assert found[0] == AS_SCRIPTED == space.settings_at(next(space.first_points()))


@given(FACTS)
def test_what_people_pinned_is_not_tried(facts: Facts) -> None:
    names = {name for name, _ in space_of(facts).dimensions}
    assert not (facts.pinned.bucket_bytes and "bucket_bytes" in names)
    assert not (facts.pinned.hierarchical is not None and "hierarchical" in names)


def test_buckets_larger_than_the_model_are_one_choice() -> None:
    (_, sizes), *_ = space_of(Facts(gradient_bytes=3 << 20)).dimensions
    assert max(sizes) == 4 << 20 and sizes[0] == 0


def test_routes_matter_where_a_node_has_several_workers_and_others_exist() -> None:
    assert "hierarchical" not in dict(space_of(Facts()).dimensions)
    assert "hierarchical" in dict(space_of(Facts(crosses=True)).dimensions)


def test_an_order_that_was_expected_is_no_choice() -> None:
    assert "order" not in dict(space_of(Facts(order=(2, 1, 0))).dimensions)
    assert dict(space_of(Facts(order=(0, 2, 1))).dimensions)["order"] == ((), (0, 2, 1))
