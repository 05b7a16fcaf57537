"""A node's reaction to changes in the store: its memory, its messages to workers, and the machine's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.base.timers import Timers
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.history.history_keeper import HistoryKeeper
from bagua_agent.job_state import change_effects as do
from bagua_agent.job_state.apply_changes import ChangeApplier
from bagua_agent.job_state.change_lines import ChangeLines
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.job_state.perform_effects import ChangePerformer
from bagua_agent.membership import events as ev
from bagua_agent.membership.view import JobView
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement

KEYS = JobKeys("job")
SPEC = pb.JobSpec(nonce="ours")


def generation(number: int, nonce: str = "ours") -> Generation:
    return Generation(number, number - 1, GenerationKind.FAILOVER, (), nonce)


def put(key: str, value: bytes, revision: int = 5) -> Change:
    return Change(key, value, revision, revision)


def removed(key: str) -> Change:
    return Change(key, None, 9, 5)


@dataclass
class Node:
    """Fakes of a node's parts, the followers and the history's writer, which record their calls."""

    said: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    ready_workers: frozenset[str] = frozenset({"w"})

    def __post_init__(self) -> None:
        self.seen = LocalJobState(SPEC, JobView())
        history = HistoryKeeper(KEYS, "host", self, lambda: 1e9)
        history.leader_is("a", leading=True)
        tells = JobTerminal(self.said.append, "host")
        job = SimpleNamespace(
            agent_id="a",
            keys=KEYS,
            seen=self.seen,
            terminal=tells,
            history=history,
            change_lines=ChangeLines(tells, Timers(), "a"),
        )
        self.news = ChangePerformer(
            cast(JoinedJob, job),
            self,
            lambda now_s: self.heard.append("leader changed"),
            lambda: self.heard.append("own key gone"),
            lambda: self.heard.append("live"),
            lambda order: self.heard.append("no hang" if order is None else f"hang {order.reason}"),
        )

    def take(self, *changes: Change) -> list[ev.Event]:
        return self.news.take(changes, 1.0)

    def follow(self, generation: Generation) -> None:
        self.heard.append(f"follow {generation.number}")

    def close_joins(self) -> None:
        self.heard.append("close")

    def refuse(self, worker_id: str, difference: str) -> None:
        self.heard.append(f"refuse {worker_id}: {difference}")

    def met(self, generation: int, address: str) -> None:
        self.heard.append(f"met {generation} {address}")

    def write(self, key: str, value: bytes) -> None:
        self.events.append(key.removeprefix(KEYS.events))

    def remove(self, keys: list[str]) -> None: ...

    def flush(self, timeout_s: float) -> bool:
        return True


def test_a_newer_record_is_followed_once() -> None:
    node = Node()
    happened = node.take(put(KEYS.generation, generation(2).encode(), 7))
    assert [type(event) for event in happened] == [ev.GenerationSeen]
    node.take(put(KEYS.generation, generation(2).encode(), 8))
    assert node.heard == ["follow 2"] and node.events == ["generation-2"]
    assert node.seen.generation == generation(2) and node.seen.generation_revision == 8


def test_a_job_becomes_live_once_and_only_by_its_own_spec() -> None:
    node = Node()
    node.seen.spec = pb.JobSpec(nonce=SPEC.nonce, mode=pb.JobSpec.RESTART)
    stranger = pb.JobSpec(nonce="another", mode=pb.JobSpec.LIVE)
    assert node.take(put(KEYS.spec, stranger.SerializeToString(), 7)) == []
    live = pb.JobSpec(nonce=SPEC.nonce, mode=pb.JobSpec.LIVE)
    assert node.take(put(KEYS.spec, live.SerializeToString(), 8)) == [ev.ModeSeen(now_s=1.0, restarts=False)]
    node.take(put(KEYS.spec, live.SerializeToString(), 9))
    assert node.heard == ["live"] and not node.seen.restarts


def test_a_meeting_is_told() -> None:
    node = Node()
    node.take(put(KEYS.meeting, pb.Meeting(generation=3, address="10.0.0.1:1").SerializeToString(), 7))
    assert node.heard == ["met 3 10.0.0.1:1"]


@pytest.mark.parametrize(
    "address", ["", "10.0.0.1", "10.0.0.1:", "10.0.0.1:port", "10.0.0.1:70000", "[::1]:-1"]
)
def test_a_meeting_without_a_port_is_passed_over_with_a_line(address: str) -> None:
    node = Node()
    node.take(put(KEYS.meeting, pb.Meeting(generation=3, address=address).SerializeToString(), 7))
    assert node.heard == []
    assert len(node.said) == 1 and KEYS.meeting in node.said[0]


def test_an_older_record_that_was_put_again_is_not_followed() -> None:
    node = Node()
    node.take(put(KEYS.generation, generation(5).encode(), 7))
    node.take(removed(KEYS.generation))
    assert node.seen.generation == generation(5) and node.seen.generation_revision == 0
    node.take(put(KEYS.generation, generation(4).encode(), 3))
    assert node.seen.generation == generation(5) and node.seen.generation_revision == 3
    assert node.heard == ["follow 5"]


def test_another_jobs_record_is_nothing_to_this_one() -> None:
    node = Node()
    assert node.take(put(KEYS.generation, generation(9, nonce="other").encode())) == []
    assert node.seen.generation is None and node.heard == []


def test_members_of_another_job_of_this_id_are_not_seen() -> None:
    """A leader that started the job anew in an emptied etcd must not form a generation of the old job's members."""
    node = Node()
    stranger = pb.Member(worker_id="v", agent_id="b", committed_generation=1, nonce="another")
    assert node.take(put(KEYS.member("v"), stranger.SerializeToString())) == []
    own = pb.Member(worker_id="w", agent_id="a", nonce=SPEC.nonce)
    (ready,) = node.take(put(KEYS.member("w"), own.SerializeToString()))
    assert isinstance(ready, ev.MemberReady) and ready.member.worker_id == "w"


def test_what_must_be_put_again_is_remembered() -> None:
    node = Node()
    desired = pb.Desired(min_nodes=1, max_nodes=2).SerializeToString()
    pinned = pb.PinnedSettings(settings=pb.StepSettings(bucket_bytes=4096)).SerializeToString()
    node.take(
        put(KEYS.spec, SPEC.SerializeToString()), put(KEYS.desired, desired), put(KEYS.settings, pinned)
    )
    node.take(
        put(KEYS.spec, pb.JobSpec(nonce="other").SerializeToString()),
        put(KEYS.desired, b"\xff"),
        put(KEYS.settings, pb.PinnedSettings(settings=pb.StepSettings(bucket_bytes=1)).SerializeToString()),
        removed(KEYS.spec),
    )
    own = SPEC.SerializeToString()
    assert node.seen.remembered == {KEYS.spec: own, KEYS.desired: desired, KEYS.settings: pinned}


def test_pinned_settings_are_told_and_recorded() -> None:
    node = Node()
    pinned = pb.PinnedSettings(settings=pb.StepSettings(algorithm="bytegrad")).SerializeToString()
    (seen,) = node.take(put(KEYS.settings, pinned, 7))
    assert isinstance(seen, ev.SettingsPinned) and seen.settings.algorithm == "bytegrad"
    assert node.events == ["tuned-7"] and node.said[-1].endswith("settings of steps: algorithm bytegrad")
    assert node.take(removed(KEYS.settings)) == [], "etcd lost it: it is put again, and not forgotten"


def test_the_end_is_told_once() -> None:
    node = Node()
    closing = put(KEYS.closing, pb.Closing(worker_id="w", generation=1).SerializeToString())
    node.take(closing, closing)
    result = pb.Result(outcome=pb.Result.SUCCEEDED, reason="done")
    node.take(put(KEYS.result, result.SerializeToString()))
    assert node.heard == ["close"] and node.seen.closing
    assert node.seen.result == result and node.seen.stopping and node.events == ["ended"]


def test_the_leader_is_known_by_its_key() -> None:
    node = Node()
    leader = pb.Leader(agent_id="b", control_address="h:1").SerializeToString()
    node.take(put(KEYS.leader, leader, 6))
    assert node.seen.leader == LeaderKey("b", "h:1", 6)
    node.take(put(KEYS.leader, b"\xff", 7))
    assert node.seen.leader == LeaderKey("b", "h:1", 6), "passed over"
    node.take(removed(KEYS.leader))
    assert node.seen.leader is None
    assert node.heard == ["leader changed"] * 2


def test_own_keys_that_vanish_are_noticed_until_the_job_ends() -> None:
    node = Node()
    node.take(removed(KEYS.agent("a")), removed(KEYS.member("w")))
    node.take(removed(KEYS.agent("b")), removed(KEYS.member("x")), removed(KEYS.spec))
    assert node.heard == ["own key gone"] * 2
    result = pb.Result(outcome=pb.Result.SUCCEEDED)
    node.take(put(KEYS.result, result.SerializeToString()), removed(KEYS.agent("a")))
    assert node.heard == ["own key gone"] * 2


def test_a_refusal_reaches_the_worker() -> None:
    node = Node()
    node.take(put(KEYS.refused("w"), pb.Refusal(worker_id="w", difference="seed").SerializeToString()))
    assert node.heard == ["refuse w: seed"]


def test_a_node_is_lost_when_a_generation_goes_on_without_it() -> None:
    node = Node()
    places = [Placement(f"w{i}", f"a{i}", f"host-{i}", 0, i, i, 0, "h:1", 1, 7, True) for i in range(3)]
    agents = [
        put(KEYS.agent(f"a{i}"), pb.Agent(agent_id=f"a{i}", node_name=f"host-{i}").SerializeToString())
        for i in range(3)
    ]
    before = Generation(1, 0, GenerationKind.PLANNED, tuple(places), "ours")
    node.take(*agents, put(KEYS.generation, before.encode()))
    # one agent is gone; of another only the worker is
    after = Generation(2, 1, GenerationKind.FAILOVER, (places[0],), "ours")
    node.take(removed(KEYS.agent("a1")), put(KEYS.generation, after.encode()))
    assert node.events == ["generation-1", "lost-a1-2", "generation-2"]


def test_keys_that_go_with_an_outage_are_no_lost_nodes() -> None:
    node = Node()
    agent = put(KEYS.agent("a1"), pb.Agent(agent_id="a1", node_name="host-1").SerializeToString())
    node.take(agent)
    node.take(removed(KEYS.agent("a1")))
    node.take(agent)
    assert node.events == []


def test_the_leaders_word_on_a_hang_is_passed_on() -> None:
    node = Node()
    order = pb.HangOrder(generation=3, outcome=pb.HangOrder.NAME, workers=["w"], reason="late")
    node.take(put(KEYS.hang, order.SerializeToString()))
    node.take(removed(KEYS.hang))
    assert node.heard == ["hang late", "no hang"]


def test_a_change_alters_the_state_and_returns_the_rest() -> None:
    """The applier holds nothing but values, so it can have no other effect."""
    seen = LocalJobState(pb.JobSpec(nonce="ours"), JobView())
    applier = ChangeApplier("a", KEYS, seen)
    closing = put(KEYS.closing, pb.Closing(worker_id="w", generation=1).SerializeToString())
    first, again = (applier.apply(closing, frozenset(), 1.0) for _ in range(2))
    assert first.event == again.event == ev.ClosingSeen(now_s=1.0, generation=1) and seen.closing
    assert first.effects == (do.CloseJoins(), do.Tell("every worker has committed its last step"))
    assert again.effects == ()

    gone = applier.apply(removed(KEYS.member("w")), frozenset({"w"}), 1.0)
    assert gone.effects == (do.RecheckOwnKeys(),)

    broken = applier.apply(put(KEYS.generation, b"\xff"), frozenset(), 1.0)
    assert broken.event is None and [type(effect) for effect in broken.effects] == [do.Tell]
    assert seen.unreadable == {KEYS.generation: 5}

    followed = applier.apply(put(KEYS.generation, generation(2).encode(), 7), frozenset({"w"}), 1.0)
    assert followed.effects[0] == do.FollowGeneration(None, generation(2)) and not seen.unreadable


def test_effects_of_a_change_are_performed_before_the_next_change_is_applied() -> None:
    """A follower sees the state as it was when its record came."""
    node = Node()
    seen: list[tuple[int, bool]] = []
    node.follow = lambda generation: seen.append((generation.number, node.seen.closing))  # type: ignore[method-assign]
    closing = put(KEYS.closing, pb.Closing(worker_id="w", generation=2).SerializeToString())
    node.take(
        put(KEYS.generation, generation(2).encode()), closing, put(KEYS.generation, generation(3).encode())
    )
    assert seen == [(2, False), (3, True)]
