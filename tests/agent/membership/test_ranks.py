"""Rule 5: the order of nodes, contiguous ranks, and a holder at rank 0."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.membership.ranks import Chosen, assign


def chosen(
    worker: str, *, since: int = 1, joined: int = 0, holder: bool = True, topology: str = ""
) -> Chosen:
    return Chosen(worker, worker[0], f"host-{worker[0]}", int(worker[1]), topology, "", since, joined, holder)


def order(*workers: Chosen) -> str:
    return " ".join(p.worker_id for p in assign(workers))


def test_holders_come_first_then_age_then_topology_then_join_order() -> None:
    assert order(chosen("a0", holder=False), chosen("b0", since=7)) == "b0 a0"
    assert order(chosen("a0", since=3), chosen("b0", since=2)) == "b0 a0"
    assert order(chosen("a0", topology="r2"), chosen("b0", topology="r1")) == "b0 a0"
    assert order(chosen("a0", joined=9), chosen("b0", joined=8)) == "b0 a0"


def test_rank_0_is_a_holder_even_where_slot_0_was_respawned() -> None:
    node = chosen("a0", since=4, holder=False), chosen("a1"), chosen("a2")
    assert order(*node) == "a1 a0 a2"
    assert order(*node, chosen("b0", since=2)) == "a1 a0 a2 b0"


@given(
    st.lists(
        st.builds(
            lambda agent, slot, since, holder: chosen(f"{agent}{slot}", since=since, holder=holder),
            st.sampled_from("abcd"),
            st.integers(0, 3),
            st.integers(1, 3),
            st.booleans(),
        ),
        min_size=1,
        unique_by=lambda c: c.worker_id,
    ),
    st.randoms(use_true_random=False),
)
def test_ranks_are_contiguous_and_do_not_depend_on_arrival(workers: list[Chosen], random) -> None:  # type: ignore[no-untyped-def]
    placements = assign(workers)
    assert [p.global_rank for p in placements] == list(range(len(workers)))
    agents = list(dict.fromkeys(p.agent_id for p in placements))
    for p in placements:
        assert p.node_rank == agents.index(p.agent_id)
        assert p.local_rank == sum(q.agent_id == p.agent_id for q in placements[: p.global_rank])
    assert [p.agent_id for p in placements] == sorted((p.agent_id for p in placements), key=agents.index)
    assert placements[0].holder or not any(w.holder for w in workers)
    random.shuffle(workers)
    assert assign(workers) == placements
