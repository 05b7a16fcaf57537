"""Every key of a job becomes its event; a key that can't be read is reported and stops no agent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.job_state.decode import StoreEvents
from bagua_agent.membership import events as ev
from bagua_agent.membership.hang import HangOrder, HangOutcome
from bagua_agent.membership.view import (
    AgentView,
    DepartureView,
    FailureView,
    MemberView,
    SuspicionView,
)
from bagua_contract import membership_pb2 as pb
from bagua_contract.collective_wait import CollectiveWait, Operation
from bagua_contract.records import Generation, GenerationKind, Placement, StateName, SuspicionKind

KEYS = JobKeys("job")
NOW_S = 12.5
GENERATION = Generation(
    3,
    2,
    GenerationKind.FAILOVER,
    (Placement("w", "a", "n", 0, 0, 0, 0, "h:1", 1, 7, True),),
    "nonce",
    "why",
    {"k": "v"},
)
STALLED = pb.Suspicion.STALLED

PUT: list[tuple[str, bytes, ev.Event | None]] = [
    (
        KEYS.agent("a"),
        pb.Agent(
            agent_id="a", node_name="n", control_address="h:1", slots=2, topology="rack", leaving=True
        ).SerializeToString(),
        ev.AgentSeen(
            now_s=NOW_S,
            agent=AgentView(
                agent_id="a",
                node_name="n",
                slots=2,
                topology="rack",
                leaving=True,
                control_address="h:1",
                join_revision=5,
            ),
        ),
    ),
    (
        KEYS.member("w"),
        pb.Member(
            worker_id="w",
            agent_id="a",
            slot=1,
            store_address="h:2",
            fingerprint={"seed": "1"},
            committed_generation=4,
            nonce="of the job",
        ).SerializeToString(),
        ev.MemberReady(
            now_s=NOW_S,
            nonce="of the job",
            member=MemberView(
                worker_id="w",
                agent_id="a",
                slot=1,
                store_address="h:2",
                fingerprint={"seed": "1"},
                committed_generation=4,
                join_revision=5,
            ),
        ),
    ),
    (
        KEYS.suspicion("w"),
        pb.Suspicion(
            worker_id="w", generation=3, kind=pb.Suspicion.BROKEN, hosts=["h", "i"], detail="d", sequence=6
        ).SerializeToString(),
        ev.SuspicionRaised(
            now_s=NOW_S,
            suspicion=SuspicionView(
                worker_id="w",
                generation=3,
                kind=SuspicionKind.BROKEN,
                hosts=("h", "i"),
                sequence=6,
                detail="d",
            ),
        ),
    ),
    (
        KEYS.suspicion("w"),
        pb.Suspicion(
            worker_id="w",
            generation=3,
            kind=pb.Suspicion.STALLED,
            sequence=7,
            waits_in=pb.CollectiveWait(
                call_site="train.py:9", operations=[pb.Operation(step=4, place=1, name="in a\nbroadcast")]
            ),
        ).SerializeToString(),
        ev.SuspicionRaised(
            now_s=NOW_S,
            suspicion=SuspicionView(
                worker_id="w",
                generation=3,
                kind=SuspicionKind.STALLED,
                hosts=(),
                sequence=7,
                waits_in=CollectiveWait("train.py:9", (Operation(4, 1, "in a broadcast"),)),
            ),
        ),
    ),
    (
        KEYS.failure("w"),
        pb.Failure(
            worker_id="w",
            node_name="n",
            step=9,
            in_step=True,
            script_failure=True,
            cause="ValueError: x",
            global_rank=-1,
            generation=4,
            exit_code=1,
            log_path="/logs/w",
            traceback_tail="tail",
            joining=True,
        ).SerializeToString(),
        ev.FailureRecorded(
            now_s=NOW_S,
            failure=FailureView(
                worker_id="w",
                node_name="n",
                step=9,
                in_step=True,
                script_failure=True,
                summary="ValueError: x",
                order=5,
                was_member=True,
                generation=4,
                exit_code=1,
                global_rank=-1,
                log_path="/logs/w",
                traceback_tail="tail",
                joining=True,
            ),
        ),
    ),
    (
        KEYS.finished("w"),
        pb.Finished(worker_id="w", step=7).SerializeToString(),
        ev.WorkerFinished(now_s=NOW_S, worker_id="w", step=7),
    ),
    (
        KEYS.finished("w"),
        pb.Finished(worker_id="w", agent_id="a", generation=3).SerializeToString(),
        ev.WorkerFinished(now_s=NOW_S, worker_id="w", agent_id="a", generation=3),
    ),
    (
        KEYS.departed("w"),
        pb.Departure(
            worker_id="w",
            agent_id="a",
            node_name="host-a",
            generation=4,
            world_size=2,
            last=pb.LastCheckpoint(
                state=pb.StateName(generation=4, step=7), part=1, parts=2, written=False, problem="full"
            ),
        ).SerializeToString(),
        ev.WorkerDeparted(
            now_s=NOW_S,
            departure=DepartureView("w", "host-a", 4, 2, StateName(4, 7), 1, 2, False, "full"),
        ),
    ),
    (
        KEYS.departed("w"),
        pb.Departure(
            worker_id="w",
            agent_id="a",
            node_name="host-a",
            generation=1,
            world_size=2,
            last=pb.LastCheckpoint(),
        ).SerializeToString(),
        ev.WorkerDeparted(
            now_s=NOW_S, departure=DepartureView("w", "host-a", 1, 2, StateName(), holds_nothing=True)
        ),
    ),
    (
        KEYS.refused("w"),
        pb.Refusal(worker_id="w", difference="seed").SerializeToString(),
        ev.MemberRefused(now_s=NOW_S, worker_id="w"),
    ),
    (KEYS.generation, GENERATION.encode(), ev.GenerationSeen(now_s=NOW_S, generation=GENERATION)),
    (
        KEYS.desired,
        pb.Desired(min_nodes=1, max_nodes=4).SerializeToString(),
        ev.DesiredChanged(now_s=NOW_S, min_nodes=1, max_nodes=4),
    ),
    (
        KEYS.closing,
        pb.Closing(worker_id="w", generation=3, step=10).SerializeToString(),
        ev.ClosingSeen(now_s=NOW_S, generation=3),
    ),
    (KEYS.result, pb.Result(outcome=pb.Result.FAILED).SerializeToString(), ev.ResultSeen(now_s=NOW_S)),
    (KEYS.spec, pb.JobSpec(nonce="n").SerializeToString(), ev.ModeSeen(now_s=NOW_S, restarts=False)),
    (
        KEYS.spec,
        pb.JobSpec(nonce="n", mode=pb.JobSpec.RESTART).SerializeToString(),
        ev.ModeSeen(now_s=NOW_S, restarts=True),
    ),
    # known, but nothing that membership decides on
    (KEYS.leader, pb.Leader(agent_id="a").SerializeToString(), None),
    (KEYS.prefix + "something/new", b"\xff", None),
    (KEYS.members + "nested/key", b"\xff", None),
]

REMOVED: list[tuple[str, ev.Event | None]] = [
    (KEYS.agent("a"), ev.AgentGone(now_s=NOW_S, agent_id="a")),
    (KEYS.member("w"), ev.MemberGone(now_s=NOW_S, worker_id="w")),
    (KEYS.suspicion("w"), ev.SuspicionCleared(now_s=NOW_S, worker_id="w")),
    *[
        (key, None)
        for key in (
            KEYS.spec,
            KEYS.desired,
            KEYS.leader,
            KEYS.generation,
            KEYS.closing,
            KEYS.result,
            KEYS.failure("w"),
            KEYS.finished("w"),
            KEYS.departed("w"),
            KEYS.refused("w"),
        )
    ],
]


class Reader:
    def __init__(self) -> None:
        self.unreadable: list[tuple[str, str]] = []
        self._events = StoreEvents(KEYS, lambda key, why: self.unreadable.append((key, why)))

    def read(self, key: str, value: bytes | None) -> ev.Event | None:
        return self._events.event_of(Change(key, value, mod_revision=8, create_revision=5), NOW_S)


@pytest.mark.parametrize(("key", "value", "event"), PUT)
def test_a_key_that_was_put(key: str, value: bytes, event: ev.Event | None) -> None:
    reader = Reader()
    assert reader.read(key, value) == event
    assert reader.unreadable == []


@pytest.mark.parametrize(("key", "event"), REMOVED)
def test_a_key_that_was_removed(key: str, event: ev.Event | None) -> None:
    reader = Reader()
    assert reader.read(key, None) == event
    assert reader.unreadable == []


MESSAGES = [
    KEYS.agent("a"),
    KEYS.member("w"),
    KEYS.suspicion("w"),
    KEYS.failure("w"),
    KEYS.generation,
    KEYS.desired,
    KEYS.closing,
    KEYS.result,
]


@pytest.mark.parametrize("key", MESSAGES)
def test_a_corrupted_value_is_reported_with_its_key(key: str) -> None:
    reader = Reader()
    assert reader.read(key, b"\xff\xff\xff") is None
    [(reported, why)] = reader.unreadable
    assert reported == key and why


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (KEYS.desired, pb.Desired(min_nodes=0, max_nodes=2)),
        (KEYS.desired, pb.Desired(min_nodes=3, max_nodes=2)),
        (KEYS.generation, pb.Generation(number=0, kind=pb.Generation.FAILOVER)),
        (KEYS.generation, pb.Generation(number=3)),
        # waits in nothing
        (
            KEYS.suspicion("w"),
            pb.Suspicion(worker_id="w", generation=3, kind=2, waits_in=pb.CollectiveWait()),
        ),
        (
            KEYS.generation,
            pb.Generation(number=3, kind=pb.Generation.FAILOVER, members=[pb.Placement(global_rank=2)]),
        ),
    ],
)
def test_an_invalid_value_is_reported(key: str, value: pb.Desired | pb.Generation | pb.Suspicion) -> None:
    reader = Reader()
    assert reader.read(key, value.SerializeToString()) is None
    assert [reported for reported, _ in reader.unreadable] == [key]


# what etcdctl, another version or a broken disk may leave under the keys that name their subject
IDENTIFIED = [
    (KEYS.agent("a"), pb.Agent(agent_id="b")),
    (KEYS.agent("a"), pb.Agent()),
    (KEYS.member("w"), pb.Member(worker_id="v", agent_id="a")),
    (KEYS.member("w"), pb.Member()),
    (KEYS.suspicion("w"), pb.Suspicion(worker_id="v", generation=1)),
    (KEYS.failure("w"), pb.Failure(worker_id="v")),
]


@pytest.mark.parametrize(("key", "value"), IDENTIFIED)
def test_a_value_about_another_subject_is_reported(key: str, value: pb.Agent | pb.Member) -> None:
    """Its removal would name the one in the key, so the one in the value would stay for ever."""
    reader = Reader()
    assert reader.read(key, value.SerializeToString()) is None
    assert [reported for reported, _ in reader.unreadable] == [key]


ANY_KEY = st.sampled_from([key for key, _, _ in PUT]) | st.text(max_size=10).map(
    lambda tail: KEYS.prefix + tail
)


@given(ANY_KEY, st.binary(max_size=40) | st.none())
def test_no_value_raises(key: str, value: bytes | None) -> None:
    reader = Reader()
    event = reader.read(key, value)
    assert event is None or not reader.unreadable


def test_a_message_is_read_or_reported() -> None:
    told: list[str] = []
    events = StoreEvents(KEYS, lambda key, why: told.append(key))
    leader = pb.Leader(agent_id="a", control_address="h:1")
    assert events.message_of(pb.Leader, Change(KEYS.leader, leader.SerializeToString(), 8, 5)) == leader
    assert events.message_of(pb.Leader, Change(KEYS.leader, None, 8, 5)) is None
    assert told == []
    assert events.message_of(pb.Leader, Change(KEYS.leader, b"\xff", 8, 5)) is None
    assert told == [KEYS.leader]


def test_a_hang_order_is_read_and_its_end() -> None:
    order = pb.HangOrder(generation=3, outcome=pb.HangOrder.REPLACE, workers=["w"], reason="late")
    events = StoreEvents(KEYS, lambda key, why: None)
    put = Change(KEYS.hang, order.SerializeToString(), 5, 5)
    assert events.event_of(put, NOW_S) == ev.HangOrderSeen(
        now_s=NOW_S, order=HangOrder(3, HangOutcome.REPLACE, ("w",), "late")
    )
    gone = events.event_of(Change(KEYS.hang, None, 9, 5), NOW_S)
    assert gone == ev.HangOrderSeen(now_s=NOW_S, order=None)


@pytest.mark.parametrize("outcome", [o for o in HangOutcome if o is not HangOutcome.NOTHING])
def test_orders_come_back_as_they_were_written(outcome: HangOutcome) -> None:
    value = pb.HangOrder(outcome=outcome.name).SerializeToString()
    event = StoreEvents(KEYS, lambda key, why: None).event_of(Change(KEYS.hang, value, 5, 5), NOW_S)
    assert isinstance(event, ev.HangOrderSeen) and event.order is not None
    assert event.order.outcome is outcome


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (KEYS.hang, pb.HangOrder(generation=3, reason="?")),
        (KEYS.suspicion("w"), pb.Suspicion(worker_id="w", kind=STALLED, waited_s=float("nan"))),
        (KEYS.suspicion("w"), pb.Suspicion(worker_id="w", kind=STALLED, waited_s=-1.0)),
        (KEYS.suspicion("w"), pb.Suspicion(worker_id="w", kind=STALLED, usual_step_s=float("inf"))),
    ],
)
def test_what_would_make_nonsense_of_a_hang_is_passed_over(key: str, value: pb.Suspicion) -> None:
    told: list[str] = []
    events = StoreEvents(KEYS, lambda key, why: told.append(key))
    assert events.event_of(Change(key, value.SerializeToString(), 5, 5), NOW_S) is None
    assert told == [key]
