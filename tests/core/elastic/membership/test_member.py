"""A member over a real session and real sockets: its waits at the end, and its state after a loss that it missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from bagua_contract import membership_pb2, session_pb2
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, GenerationKind, StateName
from bagua_core.communication import traffic
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.communication.pending import DonePending, FailedPending
from bagua_core.elastic.checks import step_timing
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import entry
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.membership.rendezvous import Building
from bagua_core.elastic.waiting.operations import MismatchedCollective
from tests.core.communication.worlds import await_true
from tests.core.elastic.agents import DEADLINE_S, Agent
from tests.core.elastic.records import generation


class Host:
    """An engine that takes notes."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.steps_out: list[bool] = []

    def info(self) -> entry.Info:
        return entry.Info(StateName(), False, {"epoch": 0, "batch": 0})

    def fingerprint(self) -> Mapping[str, str]:
        return {"model": "none"}

    def take_part(self, generation: Generation, plan: HealPlan, infos: list[entry.Info]) -> None:
        self.entered.append(generation.number)

    def stepped_out(self, left: Generation, *, keeps_state: bool, together: bool) -> None:
        self.steps_out.append(keeps_state)

    def before_leaving(self) -> membership_pb2.LastCheckpoint | None:
        return None

    def reach(self, point: str) -> None:
        return None


class Worker:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.host = Host()
        self.member = Member(WorkerEnvironment("job", "w0", "a", agent.socket, "127.0.0.1", 0, 1), self.host)

    def alone(self, number: int, **keywords: object) -> Generation:
        """A record of this worker only."""
        address = self.member.rendezvous.address
        return generation(number, "w0", store_address=address, **keywords)  # type: ignore[arg-type]

    def hear(self, record: Generation) -> None:
        self.agent.server.tell_generation(record)


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent("w0", slots=1)
    yield agent
    agent.close()


@pytest.fixture
def worker(agent: Agent) -> Iterator[Worker]:
    made = Worker(agent)
    yield made
    if made.member.communicator is not None:
        made.member.communicator.abort("the test is over")
    made.member.session.close()


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def waits(future: Future[None]) -> bool:
    with pytest.raises(TimeoutError):
        future.result(0.2)
    return True


def test_a_newcomer_at_the_end_waits_until_the_job_is_closing(
    worker: Worker, beside: ThreadPoolExecutor
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    ending = beside.submit(worker.member.wait_closed)
    assert waits(ending)
    worker.agent.server.tell_close()
    ending.result(DEADLINE_S)
    assert worker.member.is_closed and worker.host.entered == [1]


def test_an_entry_waits_for_the_other_shards_before_it_takes_part(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hear first that this one moves, and before anything that they do together whether all are there."""
    notes: list[tuple[str, int, int]] = []
    answers = iter([False, True, True])
    member, entered = worker.member, worker.host.entered

    def is_joint(number: int, moves: Callable[[], bool]) -> bool:
        notes.append(("joint", number, len(entered)))
        if number == 1:
            worker.hear(worker.alone(2, base=0))
        return next(answers)

    monkeypatch.setattr(member, "_moves_to", lambda number: notes.append(("moves", number, len(entered))))
    monkeypatch.setattr(member, "_is_joint", is_joint)
    worker.hear(worker.alone(1))
    member.follow()
    assert notes == [("moves", 1, 0), ("joint", 1, 0), ("moves", 2, 0), ("joint", 2, 0), ("joint", 2, 1)]


def test_it_drains_what_is_in_force_before_a_planned_generation_is_joined(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    in_force, notes = worker.member.communicator, []
    assert in_force is not None
    monkeypatch.setattr(in_force, "drain", lambda: [notes.append("drain"), DonePending()][1:])
    monkeypatch.setattr(Building, "drained", lambda building: notes.append("drained"))
    worker.hear(worker.alone(2))
    await_true(lambda: worker.member.switch_value() > 0, "generation 2 is built")
    worker.member.pair_reduced((1.0, 1.0))
    worker.member.follow()
    assert worker.host.entered == [1, 2] and notes == ["drain", "drained"]


def test_it_drains_what_is_in_force_before_a_group_without_joiners_is_built(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    member, notes = worker.member, []
    assert member.communicator is not None
    start = member.rendezvous.start
    monkeypatch.setattr(member.communicator, "drain", lambda: [notes.append("drain"), DonePending()][1:])
    monkeypatch.setattr(member.rendezvous, "start", lambda *what: [notes.append("build"), start(*what)][1])
    member.side_communicator((0,))
    assert notes == ["drain", "build"]


def test_a_peer_that_fails_while_it_drains_breaks_the_generation_in_force(
    worker: Worker, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    assert worker.member.communicator is not None
    failed = FailedPending(CollectiveFailed("NCCL: remote error"))
    monkeypatch.setattr(worker.member.communicator, "drain", lambda: [failed])
    worker.hear(worker.alone(2))
    await_true(lambda: worker.member.switch_value() > 0, "generation 2 is built")
    worker.member.pair_reduced((1.0, 1.0))
    following = beside.submit(worker.member.follow)
    worker.agent.wait_for(lambda: len(suspected(worker.agent)) > 0)
    assert suspected(worker.agent)[0].detail == "NCCL: remote error"
    assert worker.host.entered == [1]
    worker.hear(worker.alone(3, kind=GenerationKind.FAILOVER, base=1))
    following.result(DEADLINE_S)
    assert worker.host.entered == [1, 3]


def test_a_joining_that_fails_at_the_boundary_is_reported_and_a_failover_follows_with_the_same_state(
    worker: Worker, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    worker.hear(worker.alone(2))
    await_true(lambda: worker.member.switch_value() > 0, "generation 2 is built")

    def fails(building: Building) -> None:
        building.communicator, building.error = None, CollectiveFailed("joining NCCL: a rank did not come")

    with monkeypatch.context() as failing:
        failing.setattr(Building, "drained", fails)
        worker.member.pair_reduced((1.0, 1.0))
        following = beside.submit(worker.member.follow)
        worker.agent.wait_for(lambda: len(suspected(worker.agent)) > 0)
    told = suspected(worker.agent)[0]
    assert told.generation == 2 and "a rank did not come" in told.detail
    assert worker.member.number == 1 and worker.member.broken
    worker.hear(worker.alone(3, kind=GenerationKind.FAILOVER, base=1))
    following.result(DEADLINE_S)
    assert worker.host.entered == [1, 3] and worker.host.steps_out == []


def test_a_generation_is_built_once_although_an_older_one_was_about_to_be_entered(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers have read from the store where this worker listens: to a second building they would not connect."""
    worker.hear(worker.alone(1))
    worker.member.follow()
    member, built = worker.member, []
    start = member.rendezvous.start
    monkeypatch.setattr(
        member.rendezvous, "start", lambda *what: [built.append(what[0].number), start(*what)][1]
    )

    def reach(point: str) -> None:
        if point == "switch.before" and 3 not in built:
            worker.hear(worker.alone(3, kind=GenerationKind.FAILOVER, base=2))
            await_true(lambda: 3 in built, "generation 3 is begun")

    monkeypatch.setattr(worker.host, "reach", reach)
    worker.hear(worker.alone(2, kind=GenerationKind.FAILOVER, base=1))
    await_true(lambda: 2 in built, "generation 2 is begun")
    member.follow()
    assert worker.host.entered == [1, 3] and built == [2, 3]


def test_a_generation_that_waits_for_the_boundary_counts_as_built(worker: Worker) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    waiting = Building(worker.alone(2), "all", (0,))
    worker.hear(worker.alone(2))
    await_true(lambda: worker.member._next.building is not None, "it begins to build")
    worker.member._next.building = waiting
    assert worker.member.switch_value() == 0
    waiting.is_connected = True
    assert worker.member.switch_value() == 1
    waiting.error = CollectiveFailed("no peer")
    assert worker.member.switch_value() == 0


def test_a_disagreement_is_raised_in_the_wait_that_is_under_way_and_in_every_later_one(
    worker: Worker, beside: ThreadPoolExecutor
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    ending = beside.submit(worker.member.wait_closed)
    assert waits(ending)
    worker.agent.server.tell_disagreement("ranks disagree: rank 0 waits in barrier")
    for wait in (ending.result, worker.member.follow):
        with pytest.raises(MismatchedCollective, match="ranks disagree: rank 0 waits in barrier"):
            wait()
    assert worker.member.communicator is not None and worker.member.communicator.abort_flag.is_set()


def test_a_stall_tells_what_it_is_in_and_nothing_tells_it_while_a_group_is_met(worker: Worker) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    worker.member.trail.at(7)
    with worker.member.trail.operation("in barrier"):
        worker.member.stalled(5.0)
        with worker.member.trail.aside():
            worker.member.stalled(50.0)
    worker.agent.wait_for(lambda: len(suspected(worker.agent)) == 2)
    of_all, of_some = suspected(worker.agent)
    assert [(o.step, o.place, o.name) for o in of_all.waits_in.operations] == [(7, 0, "in barrier")]
    assert of_all.waits_in.call_site.startswith("test_member.py:")
    assert not of_some.HasField("waits_in")


def suspected(agent: Agent) -> list[session_pb2.Suspected]:
    return [m.suspected for m in agent.said_by("w0") if m.HasField("suspected")]


def test_meanwhile_it_goes_where_the_job_goes(worker: Worker, beside: ThreadPoolExecutor) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    ending = beside.submit(worker.member.wait_closed)
    worker.hear(worker.alone(2, kind=GenerationKind.FAILOVER))
    await_true(lambda: worker.host.entered == [1, 2], "the loss is entered")
    assert waits(ending)
    worker.agent.server.tell_close()
    ending.result(DEADLINE_S)
    assert worker.host.entered == [1, 2]


def test_it_ends_if_its_node_leaves_and_no_generation_lists_it(
    worker: Worker, beside: ThreadPoolExecutor
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()

    def end() -> None:
        with pytest.raises(SystemExit) as caught:
            worker.member.wait_closed()
        assert caught.value.code == 0

    ending = beside.submit(end)
    worker.agent.server.tell_leave()
    worker.hear(generation(2, "other", kind=GenerationKind.FAILOVER))
    ending.result(DEADLINE_S)
    assert worker.host.steps_out == [False]


def test_an_empty_generation_does_not_end_the_wait_of_a_collective(
    worker: Worker, beside: ThreadPoolExecutor
) -> None:
    """All members keep their state and wait, so the collective is repeated by those of the next generation."""
    worker.hear(worker.alone(1))
    worker.member.follow()
    worker.member.break_generation(CollectiveFailed("a peer is gone"))
    following = beside.submit(worker.member.follow, outside=True)
    worker.hear(generation(2, kind=GenerationKind.FAILOVER, base=1))
    await_true(lambda: worker.host.steps_out == [True], "it steps aside")
    assert worker.member.place_left_out is None
    worker.hear(worker.alone(3, kind=GenerationKind.FAILOVER, base=1))
    following.result(DEADLINE_S)
    assert worker.host.entered == [1, 3]


def test_a_worker_that_is_overtaken_while_it_steps_aside_in_a_collective_joins_at_a_boundary(
    worker: Worker, beside: ThreadPoolExecutor
) -> None:
    """Generation 3 trained without it, so no other worker is in that collective any more."""
    worker.hear(worker.alone(1))
    worker.member.follow()
    worker.member.break_generation(CollectiveFailed("a peer is gone"))
    following = beside.submit(worker.member.follow, outside=True)
    worker.hear(generation(2, kind=GenerationKind.FAILOVER, base=1))
    await_true(lambda: worker.host.steps_out == [True], "it steps aside")
    worker.hear(generation(3, "other", kind=GenerationKind.FAILOVER, base=1))
    worker.hear(worker.alone(4, kind=GenerationKind.FAILOVER, base=3, since=4))
    following.result(DEADLINE_S)
    assert worker.host.entered == [1] and worker.member.place_left_out is not None
    worker.member.follow()
    assert worker.host.entered == [1, 4] and worker.member.place_left_out is None


def test_left_out_in_a_collective_its_place_is_behind_the_jobs_workers_until_it_joins_anew(
    worker: Worker,
) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    assert worker.member.place_left_out is None
    worker.member.break_generation(CollectiveFailed("its network was cut"))
    worker.hear(generation(2, "other", "another", kind=GenerationKind.FAILOVER, base=1))
    worker.member.follow(outside=True)
    assert worker.host.steps_out == [False] and worker.member.place_left_out == (2, 3)
    worker.hear(worker.alone(3, kind=GenerationKind.FAILOVER, base=2))
    worker.member.follow()
    assert worker.member.place_left_out is None and worker.host.entered == [1, 3]


def test_closed_already_it_does_not_wait(worker: Worker) -> None:
    worker.agent.server.tell_close()
    with worker.member.changed:
        assert worker.member.changed.wait_for(lambda: worker.member.is_closed, DEADLINE_S)
    worker.member.wait_closed()


def test_a_missed_loss_makes_it_a_new_one(worker: Worker) -> None:
    """Generation 2 dropped it, and its agent was away; generation 3 lists it as one that came since."""
    worker.hear(worker.alone(1))
    worker.member.follow()
    worker.hear(worker.alone(3, kind=GenerationKind.FAILOVER, since=3, base=2))
    session = worker.member.session

    def heard() -> bool:
        return session.news.generation is not None and session.news.generation.number == 3

    with worker.member.changed:
        assert worker.member.changed.wait_for(heard, DEADLINE_S)
    worker.member.follow()
    assert worker.host.steps_out == [False], "what it holds is not the job's"
    assert worker.host.entered == [1, 3]


def kinds(worker: Worker) -> list[str]:
    said = worker.agent.said_by("w0")
    return [str(m.WhichOneof("kind")) for m in said if m.WhichOneof("kind") in ("suspected", "went_on")]


def test_a_stall_that_was_told_is_taken_back(worker: Worker) -> None:
    worker.hear(worker.alone(1))
    worker.member.follow()
    assert kinds(worker) == []
    worker.member.stalls.usual_step_s = 0.5
    began_s = time.monotonic()
    worker.member.wait_for_transfer(lambda: time.monotonic() - began_s > 0.4)
    worker.agent.wait_for(lambda: kinds(worker)[-1:] == ["went_on"])
    suspected = next(m.suspected for m in worker.agent.said_by("w0") if m.HasField("suspected"))
    assert suspected.generation == 1 and 0.2 < suspected.waited_s < 0.5
    assert suspected.usual_step_s == 0.5 and not suspected.hosts
    worker.member.wait_for_transfer(lambda: True)
    assert kinds(worker).count("went_on") == 1


def reported_waits(worker: Worker) -> list[float]:
    said = worker.agent.said_by("w0")
    return [m.suspected.waited_s for m in said if m.HasField("suspected")]


def test_a_wait_for_bytes_that_arrive_is_reported_as_a_new_one_again_and_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timing, "MOVING_REPORT_S", 0.2)
    worker.hear(worker.alone(1))
    worker.member.follow()
    began_s = time.monotonic()

    def arrives() -> bool:
        traffic.state_arrived.add(1)
        return time.monotonic() - began_s > 1.6

    worker.member.wait_for_transfer(arrives)
    worker.agent.wait_for(lambda: kinds(worker)[-1:] == ["went_on"])
    assert kinds(worker).count("went_on") == 1, "it waits inside the step all the time"
    waits = reported_waits(worker)
    assert 3 <= len(waits) <= 7 and set(waits) == {0.0}, waits


class _EndsAfterBytes(DonePending):
    """A collective whose peers wait in it until this worker's copy of the state has arrived, `looks` looks later."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        assert stalled is not None
        for look in range(1, self._looks + 1):
            traffic.state_arrived.add(1)
            stalled(look * stall_after_s)


def test_a_collective_that_waits_for_bytes_that_arrive_is_reported_as_a_new_wait_too(worker: Worker) -> None:
    """As at the first end of a round after a join, in whose allgather the joiner waits beside its copy."""
    worker.hear(worker.alone(1))
    worker.member.follow()
    worker.member.wait(_EndsAfterBytes(looks=41))  # of 0.25 s: as 10 s of waiting
    worker.agent.wait_for(lambda: kinds(worker)[-1:] == ["went_on"])
    waits = reported_waits(worker)
    assert 8 <= len(waits) <= 11 and set(waits) == {0.0}, waits


def test_a_wait_for_bytes_that_no_longer_arrive_is_reported_from_then_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timing, "MOVING_REPORT_S", 0.3)
    worker.hear(worker.alone(1))
    worker.member.follow()
    began_s = time.monotonic()

    def arrives() -> bool:
        waited_s = time.monotonic() - began_s
        if waited_s < 0.5:
            traffic.state_arrived.add(1)
        return waited_s > 1.6

    worker.member.wait_for_transfer(arrives)
    worker.agent.wait_for(lambda: kinds(worker)[-1:] == ["went_on"])
    waits = reported_waits(worker)
    moved = waits.count(0.0)
    assert moved in (1, 2) and waits[:moved] == [0.0] * moved, waits
    assert 0.2 < waits[moved] < 0.7 and waits[moved:] == sorted(waits[moved:]), waits
