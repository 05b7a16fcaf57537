"""The leader stops (SIGSTOP) until its lease has ended, and goes on: it writes nothing that was not its to write."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job.loop_watch import STUCK_AFTER_S
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Node
from tests.lab.etcd import Change, EtcdCluster
from tests.lab.network import Lab
from tests.lab.wait import HANG_S, eventually

# No agent suspects it while steps go on, so its lease (3 s) has to end; etcd ends leases within a second.
NEXT_LEADER_BOUND_S = 8.0


def reigns(one: Job, cluster: EtcdCluster) -> list[tuple[str, int, int]]:
    """The leaders, with the first and last revision of etcd of each; from the key's history."""
    found: list[tuple[str, int, int]] = []
    for change in cluster.history(JobKeys(one.job_id).leader):
        if change.value is None:
            agent, since, _ = found.pop()
            found.append((agent, since, change.revision))
        else:
            assert not found or found[-1][2] < change.revision, "one leader follows another"
            found.append((pb.Leader.FromString(change.value).agent_id, change.revision, 1 << 62))
    return found


def written_under(one: Job, cluster: EtcdCluster) -> list[tuple[int, str]]:
    """Each generation's number, and its leader. Asserts that each has a leader, and that each number occurs once."""
    led = reigns(one, cluster)
    found = []
    for change in records(one, cluster):
        assert change.value is not None
        leaders = [agent for agent, since, before in led if since < change.revision < before]
        assert len(leaders) == 1, f"a generation was written at {change.revision}, reigns are {led}"
        found.append((pb.Generation.FromString(change.value).number, leaders[0]))
    numbers = [number for number, _ in found]
    assert numbers == list(range(1, len(numbers) + 1)), "numbers grow by one, each is written once"
    return found


def records(one: Job, cluster: EtcdCluster) -> list[Change]:
    return cluster.history(JobKeys(one.job_id).generation)


def led_by_another(one: Job, cluster: EtcdCluster, first: str) -> str:
    """The agent that leads now, once it is not `first`."""
    return eventually(
        lambda: next(
            (a for a, _, before in reigns(one, cluster)[-1:] if before == 1 << 62 and a != first), ""
        ),
        NEXT_LEADER_BOUND_S,
        lambda: f"another leader; reigns: {reigns(one, cluster)}",
        0.05,
    )


def two_nodes(job: MakeJob, lab: Lab) -> tuple[EtcdCluster, Job, Node]:
    """The leader first, then a second; etcd on a host of its own."""
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:2")
    first = one.start(lab.hosts[1])
    first.await_line("this node leads")
    one.start(lab.hosts[2])
    return cluster, one, first


@pytest.mark.parametrize("frozen", ["agent", pytest.param("host", marks=pytest.mark.long)])
def test_the_leader_is_frozen_through_its_lease_and_thawed(job: MakeJob, lab: Lab, frozen: str) -> None:
    cluster, one, first = two_nodes(job, lab)
    one.await_world(2, after_step=19)
    old = reigns(one, cluster)[-1][0]
    began_s = time.monotonic()
    if frozen == "agent":
        first.freeze_agent()
    else:
        lab.hosts[1].freeze()
    led_by_another(one, cluster, old)
    one.measured(f"leader's {frozen} frozen: next leader", time.monotonic() - began_s, NEXT_LEADER_BOUND_S)
    alone = one.await_world(1, after_step=one.last_world(2))
    one.measured(f"leader's {frozen} frozen: next step", time.monotonic() - began_s, 2 * NEXT_LEADER_BOUND_S)
    before = len(records(one, cluster))
    if frozen == "agent":
        first.thaw_agent()
    else:
        lab.hosts[1].thaw()
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)
    written = written_under(one, cluster)
    assert len(written) > before
    assert old not in {agent for _, agent in written[before - 1 :]}, "the thawed one leads no more"


# Generation 1 is the gathering of the first node's worker alone, 2 trains, 3 would take in the second's.
@pytest.mark.parametrize(
    ("point", "others_go_on"),
    [
        pytest.param("election.after=stop", True, marks=pytest.mark.long),
        ("generation.before=stop@1", True),
        # a gathering has no state, so the others begin without it
        pytest.param("generation.after=stop@1", True, marks=pytest.mark.long),
        pytest.param("generation.before=stop@2", True, marks=pytest.mark.long),
        # no other worker has the state: the others wait for it
        pytest.param("generation.after=stop@2", False, marks=pytest.mark.long),
        ("generation.before=stop@3", False),
        pytest.param("generation.after=stop@3", False, marks=pytest.mark.long),
    ],
)
def test_the_leader_stops_at_a_write_and_is_thawed_after_its_lease(
    job: MakeJob, lab: Lab, point: str, others_go_on: bool
) -> None:
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:2")
    first = one.start(lab.hosts[1], agent_failpoints=point)
    first.await_line("is in force") if point.endswith("3") else first.await_stopped()
    second = one.start(lab.hosts[2])
    first.await_stopped()
    assert first.says(f"failpoint {point.partition('=')[0]} fired: stop")
    old = reigns(one, cluster)[0][0]
    new = led_by_another(one, cluster, old)
    if others_go_on:
        one.await_step(5)
    # While the new leader stops too, whatever is written in its reign is the old one's doing.
    second.freeze_agent()
    before = len(records(one, cluster))
    first.thaw_agent()
    led_by_another(one, cluster, new)
    second.thaw_agent()
    one.await_world(2, after_step=one.step)
    one.finish()
    one.check(finished=2)
    written_under(one, cluster)
    _, _, end_of_reign = next(reign for reign in reigns(one, cluster) if reign[0] == new)
    later = [change.revision for change in records(one, cluster)[before:]]
    assert all(revision > end_of_reign for revision in later), "the thawed one wrote before it led again"


@pytest.mark.long
def test_the_leaders_loop_waits_for_a_file_system_that_does_not_answer(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path
) -> None:
    """Its lease is renewed and its other threads answer meanwhile, so nothing but its own watch can tell."""
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:3")
    leader = one.start(lab.hosts[1], agent_failpoints=f"worker-end.before=hold:{tmp_path}")
    leader.await_line("this node leads")
    for host in lab.hosts[2:]:
        one.start(host)
    three = one.await_world(3)
    old = reigns(one, cluster)[-1][0]
    hold = tmp_path / "worker-end.before"
    hold.touch()
    began_s = time.monotonic()
    leader.workers[0].kill()
    two = one.await_world(2, after_step=three, deadline_s=HANG_S)
    one.measured(
        "leader's loop stuck: next step", time.monotonic() - began_s, STUCK_AFTER_S + NEXT_LEADER_BOUND_S
    )
    assert leader.says("this agent's loop has waited")
    assert reigns(one, cluster)[-1][0] != old
    (held,) = tmp_path.glob("worker-end.before.*")
    held.unlink()
    one.await_world(3, after_step=two)
    one.finish()
    one.check(finished=3)
    written_under(one, cluster)


@pytest.mark.parametrize(
    ("edge", "action"),
    [
        ("generation.before", "kill"),
        pytest.param("generation.after", "raise", marks=pytest.mark.long),
        pytest.param("generation.before", "raise", marks=pytest.mark.long),
        pytest.param("generation.after", "kill", marks=pytest.mark.long),
    ],
)
def test_the_leader_dies_or_gets_no_answer_when_it_writes_a_join(
    job: MakeJob, make_lab: MakeLab, edge: str, action: str
) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="2:3")
    first = one.start(lab.hosts[1], agent_failpoints=f"{edge}={action}@3")
    first.await_line("this node leads")
    one.start(lab.hosts[2])
    one.await_world(2)
    one.start(lab.hosts[3])
    first.await_line(f"failpoint {edge} fired: {action}")
    if action == "kill":
        assert first.process.wait(10) == -signal.SIGKILL
        one.await_world(2, after_step=one.step)
    else:
        one.await_world(3)
    one.finish([-9, 0, 0] if action == "kill" else None)
    one.check(finished=2 if action == "kill" else 3)
    written_under(one, cluster)
    assert action == "raise" or len(reigns(one, cluster)) == 2


@pytest.mark.parametrize("edge", ["result.before", pytest.param("result.after", marks=pytest.mark.long)])
def test_the_leader_dies_when_it_writes_the_result(job: MakeJob, lab: Lab, edge: str) -> None:
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="2:2", samples=480)
    first = one.start(lab.hosts[1], agent_failpoints=f"{edge}=kill")
    first.await_line("this node leads")
    second = one.start(lab.hosts[2])
    one.finish([-9, 0])
    assert first.says(f"failpoint {edge} fired: kill")
    assert second.says("succeeded")
    one.check(finished=2)


@pytest.mark.parametrize(
    "edge", ["agent-removal.before", pytest.param("agent-removal.after", marks=pytest.mark.long)]
)
def test_the_leader_dies_when_it_removes_a_dead_agent(job: MakeJob, make_lab: MakeLab, edge: str) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:3")
    first = one.start(lab.hosts[1], agent_failpoints=f"{edge}=kill")
    first.await_line("this node leads")
    others = [one.start(host) for host in lab.hosts[2:]]
    three = one.await_world(3)
    others[0].kill_agent()
    assert first.process.wait(20) == -signal.SIGKILL
    assert first.says(f"failpoint {edge} fired: kill")
    one.await_world(1, after_step=three)
    one.finish([-9, -9, 0])
    one.check(finished=1)
    written_under(one, cluster)


@pytest.mark.parametrize(
    "edge", ["leader-removal.before", pytest.param("leader-removal.after", marks=pytest.mark.long)]
)
def test_the_agent_that_removes_a_dead_leader_dies_too(job: MakeJob, make_lab: MakeLab, edge: str) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:3")
    leader = one.start(lab.hosts[1])
    leader.await_line("this node leads")
    remover = one.start(lab.hosts[2], agent_failpoints=f"{edge}=kill")
    one.start(lab.hosts[3], agent_failpoints="leader-removal.before=delay:5")
    three = one.await_world(3)
    leader.kill_agent()
    assert remover.process.wait(20) == -signal.SIGKILL
    assert remover.says(f"failpoint {edge} fired: kill")
    one.await_world(1, after_step=three)
    one.finish([-9, -9, 0])
    one.check(finished=1)
    written_under(one, cluster)
