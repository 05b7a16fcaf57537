"""A worker's suspicion keeps its kind on the way from the store to the rules; kinds of other versions are harmless."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.job_state.decode import StoreEvents
from bagua_agent.membership import events as ev
from bagua_agent.membership.state_machine.picture import absorb
from bagua_agent.membership.view import Evidence, JobView
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import SuspicionKind

KEYS = JobKeys("job")


def read(kind: int, detail: str = "", *, told: list[str]) -> ev.Event | None:
    value = pb.Suspicion(
        worker_id="w", generation=3, kind=cast(pb.Suspicion.Kind, kind), detail=detail, sequence=1
    )
    change = Change(KEYS.suspicion("w"), value.SerializeToString(), 5, 5)
    return StoreEvents(KEYS, lambda key, why: told.append(why)).event_of(change, 1.0)


@pytest.mark.parametrize("kind", SuspicionKind)
@pytest.mark.parametrize("detail", ["", "generation 3 can't be built here: timed out"])
def test_the_kind_stands_in_the_picture_whatever_the_text_says(kind: SuspicionKind, detail: str) -> None:
    event = read(kind.value, detail, told=[])
    assert isinstance(event, ev.SuspicionRaised)
    view, _, _ = absorb(JobView(), Evidence("a"), event, 1)
    suspicion = view.suspicions["w"]
    assert (suspicion.kind, suspicion.detail) == (kind, detail)
    assert suspicion.broken is (kind is SuspicionKind.BROKEN)


def test_every_kind_of_the_contract_is_known() -> None:
    assert {k.value for k in SuspicionKind} == set(pb.Suspicion.Kind.values()) - {
        pb.Suspicion.KIND_UNSPECIFIED
    }


@given(st.integers(-(2**31), 2**31 - 1).filter(lambda n: n not in {k.value for k in SuspicionKind}))
def test_a_kind_that_this_version_does_not_know_is_passed_over_and_told(kind: int) -> None:
    """Nor may it count as a wait: a worker that does not wait then would be replaced in the end."""
    told: list[str] = []
    assert read(kind, told=told) is None
    assert told == [f"{kind} is not a valid SuspicionKind"]
