"""An elected agent acts as leader only once it sees the whole job, and not at all if another leads by then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job.messages import LeadershipReported, ScopeFollowed
from bagua_agent.job.subscription_scope import SubscriptionScope
from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.large_jobs.scope import Scope
from bagua_agent.leadership.reports import Elected, NotElected
from bagua_agent.membership.view import AgentView, JobView
from bagua_contract import membership_pb2 as pb

KEYS = JobKeys("job")
OURS = pb.JobSpec(nonce="ours")
WON = Elected(7)


@dataclass
class Parts:
    """The subscription, the membership and the lost keys, in one fake that records its calls in order."""

    whole: bool
    spec: pb.JobSpec = field(default_factory=lambda: OURS)
    leading: bool = False
    asked: list[Any] = field(default_factory=list)

    def value(self, key: str) -> bytes | None:
        return self.spec.SerializeToString() if key == KEYS.spec else None

    def look(self, now_s: float | None = None, **situation: Any) -> None:
        self.asked.append("lost keys" if now_s is not None else situation)

    def followed(self, message: ScopeFollowed) -> None:
        self.whole = message.scope is Scope.WHOLE

    def take(self, report: object, now_s: float) -> None:
        self.asked.append(report)
        self.leading = isinstance(report, Elected)


@dataclass
class Job:
    seen: LocalJobState
    agent_id: str = "a"
    keys: JobKeys = KEYS


def scope(whole: bool, **parts: Any) -> tuple[SubscriptionScope, Parts, LocalJobState]:
    made = Parts(whole, **parts)
    seen = LocalJobState(OURS, JobView())
    job: Any = Job(seen)
    return SubscriptionScope(job, made, made, made), made, seen  # type: ignore[arg-type]


def test_an_election_is_acted_on_at_once_where_all_is_seen() -> None:
    one, parts, seen = scope(True)
    one.reported(LeadershipReported(WON), 1.0)
    assert parts.asked == [WON, {"leads": True, "strange_spec": False, "nodes": 0}]
    assert seen.whole


def test_in_a_large_job_only_once_all_has_been_told() -> None:
    one, parts, seen = scope(False)
    one.reported(LeadershipReported(WON), 1.0)
    assert parts.asked == [{"leads": True, "strange_spec": False, "nodes": 0}], "all is to be followed first"
    assert not seen.whole
    one.followed(ScopeFollowed(Scope.WHOLE), 2.0)
    assert parts.asked[1:] == ["lost keys", WON], "what is lost is put again before anything is decided on it"
    assert seen.whole
    one.followed(ScopeFollowed(Scope.WHOLE), 3.0)
    assert parts.asked[3:] == ["lost keys"], "one election counts once"


def test_an_election_that_another_has_followed_is_forgotten() -> None:
    one, parts, seen = scope(False)
    one.reported(LeadershipReported(WON), 1.0)
    seen.leader = LeaderKey("b", "127.0.0.1:1", 9)
    one.look_around()
    assert parts.asked[-1]["leads"] is False
    one.followed(ScopeFollowed(Scope.WHOLE), 2.0)
    assert WON not in parts.asked


def test_other_reports_are_not_held_back() -> None:
    one, parts, _ = scope(False)
    one.reported(LeadershipReported(NotElected()), 1.0)
    assert parts.asked[0] == NotElected()


def test_less_is_seen_again_where_the_job_is_large() -> None:
    one, parts, seen = scope(True)
    seen.view = JobView(agents={name: AgentView(name, name, 1, "", False, "", 1) for name in ("a", "b", "c")})
    one.look_around()
    assert parts.asked == [{"leads": False, "strange_spec": False, "nodes": 3}]
    one.followed(ScopeFollowed(Scope.OWN), 1.0)
    assert not seen.whole and "lost keys" not in parts.asked


@pytest.mark.parametrize("whole", [False, True])
def test_another_jobs_spec_is_judged_only_where_all_is_seen(whole: bool) -> None:
    one, parts, _ = scope(whole, spec=pb.JobSpec(nonce="theirs"))
    assert one.too_little_to_judge() is not whole
    one.look_around()
    assert parts.asked[-1]["strange_spec"] is True
    parts.spec = OURS
    assert not one.too_little_to_judge()
