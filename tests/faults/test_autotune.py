"""A job with autotuning finds a better route than its script's while it trains, and goes on without its leader."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_agent.autotune.records import decode_study
from bagua_agent.autotune.study import BUDGET, Phase, Study
from bagua_agent.autotune.tuned_records import PREFIX, Tuned
from bagua_agent.etcd.keys import JobKeys
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, Job
from tests.lab.etcd import EtcdCluster
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("train_tuned.py")
SETTLES_WITHIN_S = 150.0
SAMPLES, BATCH = 40, 4
OPTIONS = (
    *("--autotune-level", "1", "--is-output-autotune-log", "--autotune-max-samples", "3"),
    *("--autotune-sampling-confidence-time", "2", "--autotune-warmup-time", "2"),
)


def study_of(one: Job, cluster: EtcdCluster) -> Study:
    """The newest record."""
    values = [c.value for c in cluster.history(JobKeys(one.job_id).study) if c.value is not None]
    return decode_study(values[-1]) if values else Study()


def kept_for_later_jobs(cluster: EtcdCluster) -> list[Tuned]:
    return [Tuned.decode(standing.value) for standing in cluster.standing(PREFIX).values()]


def await_settled(one: Job, cluster: EtcdCluster) -> Study:
    def settled() -> Study | None:
        found = study_of(one, cluster)
        return found if found.phase is Phase.SETTLED else None

    return eventually(settled, SETTLES_WITHIN_S, lambda: f"the study settles: {study_of(one, cluster)}", 0.2)


def test_a_better_route_over_a_slow_link_is_found_and_kept(job: MakeJob, make_lab: MakeLab) -> None:
    """Two workers on each of two hosts: a flat ring sends half as much again over the link as one worker a host."""
    pytest.importorskip("optuna")
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[0])
    one = job(
        file=SCRIPT, options=OPTIONS, endpoints=cluster.endpoints, nodes="1:2", samples=SAMPLES, epochs=500
    )
    leader = one.start(lab.hosts[1], slots=2)
    leader.await_line("this node leads")
    other = one.start(lab.hosts[2], slots=2)
    one.await_world(4)
    lab.shape("8mbit")
    found = await_settled(one, cluster)
    scripted = next(t for t in found.trials if t.settings.is_empty)
    assert found.world == "4 workers on 2 nodes" and len(found.trials) == 3
    assert found.current.hierarchical is True, found
    assert found.best is not None and found.best.rate > 1.15 * scripted.rate, found
    assert found.lost_s <= BUDGET * found.trained_s + 2.0, found
    leader.await_line("settles on hierarchical", "against the script's settings")
    (kept,) = eventually(
        lambda: kept_for_later_jobs(cluster), DEADLINE_S, "the finding is kept for later jobs"
    )
    assert kept.settings.hierarchical is True and kept.job_id == one.job_id
    assert kept.place.network.startswith("2^"), f"the network was measured: {kept.place}"

    lab.shape(None)
    leader.kill_agent()
    other.await_line("this node leads")
    other.await_line("autotune: study", "begins with hierarchical: the world is 2 workers on 1 node")
    one.hurry()
    assert other.process.wait(DEADLINE_S) == 0, other.log
    ends = one.ends()
    assert len(ends) == 2 and len({end["parameters"] for end in ends}) == 1
    assert {end["operation"] for end in ends} == {"HierarchicalSum"}, (
        "the settings outlive the leader that found them"
    )
    one.check_nothing_left()
