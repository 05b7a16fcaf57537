"""Jobs submitted to a cluster: they start, share nodes, outlive daemons, and end; every sample of each once."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from bagua_agent.cluster_client import cluster_requests
from tests.cluster.cluster import DEADLINE_S, POLL_S
from tests.cluster.conftest import MakeCluster
from tests.lab.wait import eventually


def test_a_second_job_takes_what_the_first_can_spare_and_gives_it_back(make_cluster: MakeCluster) -> None:
    """The first has sizes: one node less would be two."""
    cluster = make_cluster(3)
    first = cluster.submit("first", (1, 3), sizes=(1, 3))
    wide = first.await_world(3)
    second = cluster.submit("second", (1, 1))
    second.await_world(1)
    narrow = first.await_world(1, after_step=wide)
    assert len(first.nodes) == 1 and len(second.nodes) == 1
    second.hurry()
    ended = second.await_outcome()
    assert (ended.outcome, ended.exit_code) == ("succeeded", 0)
    first.await_world(3, after_step=narrow)
    first.hurry()
    assert first.await_outcome().exit_code == 0
    first.check()
    second.check()
    cluster.await_idle()


def test_a_job_that_ends_without_a_scheduler_runs_once(make_cluster: MakeCluster) -> None:
    """Daemons start its units again until there is an outcome. The scheduler stays one while it is frozen."""
    cluster = make_cluster(2, node_lease_s=DEADLINE_S)
    job = cluster.submit("job", (2, 2))
    job.await_world(2)
    frozen = cluster.daemon(cluster.scheduler())
    other = next(d for d in cluster.daemons if d is not frozen)
    assert frozen.process is not None
    frozen.process.send(signal.SIGSTOP)
    try:
        job.hurry()
        agent_log = other.directory / "state/units/job/agent.log"
        eventually(
            lambda: (
                agent_log.exists() and "job 'job' is over, so this node has no part" in agent_log.read_text()
            ),
            DEADLINE_S,
            lambda: f"the unit was started again\n{cluster.logs()}",
            0.1,
        )
    finally:
        frozen.process.send(signal.SIGCONT)
    assert job.await_outcome().exit_code == 0
    job.check()
    cluster.await_idle()


def test_daemons_are_killed_under_a_job_and_one_is_the_scheduler(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    job = cluster.submit("job", (2, 2))
    job.await_world(2)
    for daemon in cluster.daemons:
        before = job.step
        daemon.kill()
        daemon.start()
        daemon.await_line("job job runs here already, in slots 0")
        job.await_world(2, after_step=before + 1)
    eventually(cluster.scheduler, DEADLINE_S, lambda: f"a daemon schedules\n{cluster.logs()}")
    generations = {line.generation for line in job.ledger.lines}
    assert len(generations) == 1, "membership never noticed"
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()
    cluster.await_idle()


def test_a_job_is_scaled_and_stopped(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    job = cluster.submit("job", (1, 1))
    one = job.await_world(1)
    assert cluster_requests.scale_submitted(cluster.store, "job", 2, 3) == (1, 1)
    three = job.await_world(3, after_step=one)
    cluster_requests.scale_submitted(cluster.store, "job", 2, 2)
    job.await_world(2, after_step=three)
    cluster_requests.stop(cluster.store, "job")
    ended = job.await_outcome()
    assert ended.outcome == "stopped"
    cluster.await_idle()


@pytest.mark.long  # four workers, two of which start again
def test_a_job_that_hands_over_its_state_while_it_shrinks_keeps_to_its_sizes(
    make_cluster: MakeCluster,
) -> None:
    """The scheduler takes the two nodes that the job's leader would keep: the workers of the others are younger. The
    state has to be handed over, and the job does not have four nodes again for it."""
    cluster = make_cluster(4)
    job = cluster.submit("job", (2, 4), sizes=(2, 4))
    job.await_world(4)
    old, young = job.nodes[:2], job.nodes[2:]
    for name in young:
        (worker,) = cluster.daemon(name).workers()
        os.kill(worker, signal.SIGKILL)

    def are_in_order() -> bool:
        since = {m.node_name: m.since_generation for m in job.generations()[-1].members}
        return len(since) == 4 and max(since[n] for n in old) < min(since[n] for n in young)

    eventually(are_in_order, DEADLINE_S, lambda: f"successors of the workers\n{cluster.logs()}", POLL_S)
    seen = job.generations()[-1].number
    # the successors too: one that is held in its first step has no state to go on with
    eventually(
        lambda: {line.global_rank for line in job.ledger.lines if line.generation == seen} == {0, 1, 2, 3},
        DEADLINE_S,
        lambda: f"all four have committed a step of generation {seen}\n{cluster.logs()}",
        POLL_S,
    )
    four = job.step
    (job.out / "hold").touch()
    cluster_requests.scale_submitted(cluster.store, "job", 2, 2)
    eventually(
        lambda: job.nodes == young and job.leaving() == {m.node_name for m in job.generations()[-1].members},
        DEADLINE_S,
        lambda: f"both nodes of the next generation leave\n{cluster.logs()}",
        POLL_S,
    )
    (job.out / "hold").unlink()
    eventually(
        lambda: {m.node_name for m in job.generations()[-1].members} == {*young},
        DEADLINE_S,
        lambda: f"{young} have the state\n{cluster.logs()}",
        POLL_S,
    )
    later = [g for g in job.generations() if g.number > seen]
    assert {g.node_count for g in later} == {2}, [str(g) for g in later]
    job.await_world(2, after_step=four)
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()
    cluster.await_idle()


def test_a_drained_node_is_replaced_before_the_job_leaves_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    job = cluster.submit("job", (1, 1))
    begun = job.await_world(1)
    (there,) = job.nodes
    cluster_requests.drain(cluster.store, there, force=False, reason="")
    eventually(lambda: job.nodes not in ([], [there]), DEADLINE_S, lambda: f"another node\n{cluster.logs()}")
    eventually(lambda: there not in job.nodes, DEADLINE_S, lambda: f"{there} is left\n{cluster.logs()}")
    job.await_world(1, after_step=max(begun, job.step))
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()
    assert all(daemon.says("job job starts") for daemon in cluster.daemons)
    assert 2 in {line.world_size for line in job.ledger.lines}, "the new one joined before the old one left"
    cluster.await_idle()


@pytest.mark.long  # it takes the scheduler 15 s to give a node up
def test_a_node_that_is_gone_is_replaced(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    job = cluster.submit("job", (2, 2))
    both = job.await_world(2)
    lost = next(cluster.daemon(name) for name in job.nodes if name != cluster.scheduler())
    lost.host.power_off()
    again = job.await_world(2, after_step=both + 1)
    assert lost.name not in job.nodes and again > both
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()


def test_the_scheduler_dies_having_written_a_gang_start(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    scheduler = cluster.daemon(eventually(cluster.scheduler, DEADLINE_S, "a scheduler"))
    scheduler.kill()
    other = next(d for d in cluster.daemons if d is not scheduler)
    eventually(lambda: cluster.scheduler() == other.name, DEADLINE_S, "the other one schedules")
    other.kill()
    other.start(failpoints="orders.after=kill")
    other.await_line("this node schedules")
    job = cluster.submit("job", (1, 1))
    eventually(lambda: not other.process.is_running, DEADLINE_S, "its end")  # type: ignore[union-attr]
    assert other.says("failpoint orders.after fired: kill")
    assert job.nodes, "the order is written"
    for daemon in cluster.daemons:
        daemon.start()
    job.await_world(1)
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()


def test_an_etcd_that_was_away_and_one_that_lost_its_keys(make_cluster: MakeCluster) -> None:
    """Nothing that runs ends, nothing that waits is forgotten, and a daemon schedules again."""
    cluster = make_cluster(2)
    first = cluster.submit("first", (2, 2))
    second = cluster.submit("second", (1, 1))
    both = first.await_world(2)  # by then every daemon has long heard of the second
    cluster.etcd.kill()
    first.await_world(2, after_step=both + 4)  # longer than a lease
    cluster.etcd.restart()
    cluster.await_nodes(2)
    cluster.etcd.kill()
    for member in cluster.etcd.members:
        shutil.rmtree(member.data)
    cluster.etcd.restart()
    # By the daemon that reads the empty store first; the other may find them there again.
    cluster.await_line("etcd has lost /bagua/v1/cluster/submissions/second; it is put back")
    cluster.await_line("etcd has ended this node's lease")
    both = first.step
    first.await_world(2, after_step=both + 4)  # longer than a lease
    assert len({line.generation for line in first.ledger.lines}) <= 2, "membership went on as it was"
    first.hurry()
    assert first.await_outcome().exit_code == 0
    first.check()
    second.await_world(1)
    second.hurry()
    assert second.await_outcome().exit_code == 0
    second.check()
    cluster.await_idle()
