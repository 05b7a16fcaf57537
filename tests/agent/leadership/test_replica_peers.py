"""An agent touches those that hold parts of its node's replicas, in a large job by the addresses in the records."""

from __future__ import annotations

from bagua_agent.leadership.replica_peers import MOST_FORMER, ReplicaPeers
from bagua_agent.membership import events as ev
from bagua_agent.membership.view import AgentView
from bagua_agent.rpc.reachability import Reachability
from bagua_contract.replica import Replica, ReplicaMember
from tests.agent.leadership.test_dead_leader import Agent


def replica(other: str, address: str | None = None, *, number: int = 0) -> Replica:
    """Of this node and `other`. number: of the replica, among those of the two. address: None: that of `other`."""
    known = f"{other}:1" if address is None else address
    mine = ReplicaMember(f"me.{number}{other}", "me", "host-me", 0, "me:2", "me:1")
    theirs = ReplicaMember(f"{other}.{number}", other, f"host-{other}", 0, f"{other}:2", known)
    return Replica(mine.worker_id, (mine, theirs))


def agent(name: str) -> AgentView:
    return AgentView(name, f"host-{name}", 1, "", False, f"{name}:9", 1)


def sees(node: Agent, record: Replica, now_s: float = 1.0) -> None:
    node.membership.advance(ev.ReplicaSeen(now_s=now_s, replica=record))
    node.membership.follow_replicas(now_s)


def test_in_a_large_job_a_host_of_the_replica_that_falls_silent_is_noticed() -> None:
    """The agent does not follow the others' keys."""
    node, silent, cut_off = Agent(replica_size=2), list[str](), list[frozenset[str]]()
    node.membership.on_silent_mate = lambda agent_id, now_s: silent.append(agent_id)
    node.membership.on_cut_off = cut_off.append
    node.seen.whole = False
    sees(node, replica("b"))
    node.round(1.0, b=Reachability.ANSWERED)
    for number in range(3):
        assert silent == []
        node.round(1.5 + 0.5 * number, b=Reachability.SILENT)
    assert node.touched == [{"b": "b:1"}] * 4
    assert silent == ["b"] and cut_off[-1] == {"b"}


def test_an_agent_that_the_replica_lost_is_still_touched_until_it_answers() -> None:
    node, cut_off = Agent(replica_size=2), list[frozenset[str]]()
    node.membership.on_cut_off = cut_off.append
    node.seen.whole = False
    sees(node, replica("b"))
    node.round(1.0, b=Reachability.ANSWERED)
    node.round(1.5, b=Reachability.REFUSED)
    node.membership.advance(ev.ReplicaGone(now_s=1.8, replica_id=replica("b").replica_id))
    node.round(2.0, b=Reachability.SILENT)
    assert cut_off[-1] == {"b"}
    node.round(2.5, b=Reachability.ANSWERED)
    assert cut_off[-1] == frozenset()


def test_an_agent_whose_key_is_gone_is_not_cut_off_any_more() -> None:
    """It is touched no more, and may come back with its own key: the two could never form a replica again."""
    node, cut_off = Agent(replica_size=2), list[frozenset[str]]()
    node.membership.on_cut_off = cut_off.append
    node.sees_agent("b", 1)
    sees(node, replica("b"))
    node.round(1.0, b=Reachability.ANSWERED)
    node.round(1.5, b=Reachability.REFUSED)
    assert cut_off[-1] == {"b"}
    node.membership.advance(ev.ReplicaGone(now_s=1.8, replica_id=replica("b").replica_id))
    node.membership.advance(ev.AgentGone(now_s=1.8, agent_id="b"))
    for due in node.timers.take_due(2.0):
        due(2.0)
    assert cut_off[-1] == frozenset()


MATES = {name: agent(name) for name in "abc"}


def test_where_all_keys_are_seen_they_alone_say_which_agents_there_are() -> None:
    peers = ReplicaPeers("me")
    assert peers.addresses([replica("b")], {}, whole=True, met=()) == {}, "it is gone"
    assert peers.addresses([replica("b")], MATES, whole=True, met=()) == {"b": "b:9"}
    assert peers.addresses([replica("c")], MATES, whole=True, met=()) == {"b": "b:9", "c": "c:9"}
    assert peers.addresses([], {"c": MATES["c"]}, whole=True, met={"b", "c"}) == {"c": "c:9"}
    assert peers.addresses([], MATES, whole=True, met={"b", "c"}) == {"c": "c:9"}, "b was forgotten"


def test_replicas_of_other_nodes_are_not_its_concern() -> None:
    others = Replica("x", tuple(ReplicaMember(f"{a}.0", a, f"host-{a}", 0, f"{a}:2", f"{a}:1") for a in "ab"))
    for whole in (True, False):
        assert ReplicaPeers("me").addresses([others], MATES, whole=whole, met=()) == {}


def test_a_record_of_an_older_leader_has_no_address() -> None:
    assert ReplicaPeers("me").addresses([replica("b", "")], {}, whole=False, met=()) == {}


def test_in_a_large_job_former_mates_are_remembered_if_they_have_answered() -> None:
    peers = ReplicaPeers("me")
    listed = [replica("b"), replica("c")]
    assert peers.addresses(listed, {}, whole=False, met=()) == {"b": "b:1", "c": "c:1"}
    assert peers.addresses([], {}, whole=False, met={"c"}) == {"c": "c:1"}
    assert peers.addresses([replica("b")], {}, whole=False, met={"c"}) == {"b": "b:1", "c": "c:1"}


def test_in_a_large_job_the_newest_former_mates_are_remembered() -> None:
    """No key says that an agent is gone."""
    peers, names = ReplicaPeers("me"), [f"n{number}" for number in range(MOST_FORMER + 3)]
    for name in names:
        peers.addresses([replica(name)], {}, whole=False, met=names)
    assert list(peers.addresses([], {}, whole=False, met=names)) == names[-MOST_FORMER:]
    held = peers.addresses([replica(name) for name in names], {}, whole=False, met=names)
    assert sorted(held) == sorted(names), "those that records list are not limited"
