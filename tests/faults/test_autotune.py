"""Jobs with autotuning find better settings than their scripts' while they train, and know what earlier jobs found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bagua_agent.autotune.records import decode_study
from bagua_agent.autotune.study_records import BETTER_BY, BUDGET, Phase, Study
from bagua_agent.autotune.tuned_records import PREFIX, Tuned
from bagua_agent.etcd.keys import JobKeys
from bagua_contract.step_settings import AS_SCRIPTED
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, Job, Node
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Host
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("train_tuned.py")
SETTLES_WITHIN_S = 150.0
SAMPLES = 40
OPERATIONS = {"hierarchical": "HierarchicalSum", "algorithm bytegrad": "CompressedSum"}
TAKEN = re.compile(r"is in force .*other settings of steps: ([^;]+)")
TRIED = re.compile(r"trial \d+ of study \d+: [^:]+: ([\d.]+) steps/s")
SETTLED = re.compile(r"study \d+ settles on ([^:]+):")
OPTIONS = (
    *("--autotune-level", "2", "--autotune-algorithms", "bytegrad,qadam"),
    "--is-output-autotune-log",
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


def test_better_settings_over_a_slow_link_are_found_and_kept(job: MakeJob, make_lab: MakeLab) -> None:
    """Two workers on each of two hosts: a flat ring sends half as much again over the link as one worker a host, and
    eight bits are a quarter of that."""
    pytest.importorskip("optuna")
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[0])

    def start(*options: str) -> tuple[Job, Node, Node]:
        """On shaped links, with two workers a host; the first node leads."""
        lab.shape(None)
        one = job(
            file=SCRIPT, options=[*OPTIONS, *options], endpoints=cluster.endpoints, nodes="1:2",
            samples=SAMPLES, epochs=500,
        )  # fmt: skip
        leader = one.start(lab.hosts[1], slots=2)
        leader.await_line("this node leads")
        one.await_step(1)
        lab.shape("8mbit")  # before the first exchange, so the network is measured as it stays
        other = one.start(lab.hosts[2], slots=2)
        one.await_world(4)
        return one, leader, other

    one, leader, other = start("--autotune-max-samples", "4")
    found = await_settled(one, cluster)
    rates = {str(t.settings): t.rate for t in found.trials}
    assert found.world == "4 workers on 2 nodes"
    assert list(rates) == ["as the script says", "hierarchical", "flat", "algorithm bytegrad"]
    assert rates["hierarchical"] > 1.15 * found.scripted_rate, found
    # bytegrad is the faster one, unless processors are too busy to compress
    assert str(found.current) in OPERATIONS, found
    assert found.lost_s <= BUDGET * found.trained_s + 2.0, found
    leader.await_line("qadam is left out: the script's optimizer is SGD")
    leader.await_line(f"settles on {found.current}", "against the script's settings")
    check_proposal(one, found, leader, lab.hosts[0])
    told = one.command(lab.hosts[0], "events")
    for number, trial in enumerate(found.trials, 1):
        assert f"trial {number} of study {found.number}: {trial.settings}: {trial.rate:.3g} steps/s" in told
    (kept,) = eventually(
        lambda: kept_for_later_jobs(cluster), DEADLINE_S, "the finding is kept for later jobs"
    )
    assert kept.settings == found.current and kept.job_id == one.job_id
    assert kept.place.network.startswith("2^"), f"the network was measured: {kept.place}"

    lab.shape(None)
    leader.kill_agent()
    other.await_line("this node leads")
    other.await_line("autotune: study", f"begins with {found.current}: the world is 2 workers on 1 node")
    one.hurry()
    assert other.process.wait(DEADLINE_S) == 0, other.log
    ends = one.ends()
    assert len(ends) == 2 and len({end["parameters"] for end in ends}) == 1
    # of a slow run the end comes within a later trial of the next study
    in_force = [str(found.current), *TAKEN.findall(other.log.rpartition("this node leads")[2])][-1]
    assert {end["operation"] for end in ends} == {OPERATIONS.get(in_force, "Sum")}, (
        f"the settings outlive the leader that found them; {in_force}"
    )
    one.check_nothing_left()

    two, leader, _ = start("--autotune-max-samples", "2")
    later = await_settled(two, cluster)
    assert [str(t.settings) for t in later.trials] == ["as the script says", str(found.current)]
    leader.await_line(f"trying {found.current}, which job '{one.job_id}' found for this model")
    two.finish()


def test_the_order_in_which_gradients_are_ready_is_a_trial(job: MakeJob) -> None:
    """The model uses its layers in the reverse of the order in which it registers them. Whether the measured order is
    faster depends on the machine; it is kept or not by the rates of both trials, and all workers have the same one."""
    pytest.importorskip("optuna")
    options = [
        *("--autotune-level", "1", "--is-output-autotune-log", "--autotune-max-samples", "2"),
        *("--autotune-sampling-confidence-time", "1", "--autotune-warmup-time", "1"),
    ]
    one = job(
        file=SCRIPT, options=options, script=["--backwards", "--step-s", "0.03"], samples=SAMPLES, epochs=5000
    )
    node, measured = one.start(slots=2), "measured order of 4 tensors"
    node.await_line(f"trial 2 of study 1: {measured}: ", deadline_s=SETTLES_WITHIN_S)
    node.await_line("settles on", "2 trials are as many as were asked for")
    scripted_rate, rate = (float(found) for found in TRIED.findall(node.log))
    (settled,) = SETTLED.findall(node.log)
    if settled == measured:
        assert rate > scripted_rate * (BETTER_BY - 0.01), "rates are printed in three digits"
    else:
        assert settled == str(AS_SCRIPTED) and rate < scripted_rate * (BETTER_BY + 0.01)
        node.await_line(f"other settings of steps: {AS_SCRIPTED}")
    one.finish()
    assert TAKEN.findall(node.log)[0] == measured, "it was in force"
    ends, registered = one.ends(), [f"{layer}.weight" for layer in range(4)]
    assert len(ends) == 2 and len({end["parameters"] for end in ends}) == 1
    used = registered if settled == measured else registered[::-1]
    assert [end["order"] for end in ends] == [used] * 2
    one.check_nothing_left()


def check_proposal(one: Job, study: Study, leader: Node, host: Host) -> None:
    """The first trial ends with a prediction; the algorithm is allowed, so a generation has it from a step boundary on,
    and its measurement joins the prediction. People see both."""
    found = study.proposal
    assert found is not None and found.is_worth_it, study
    assert (found.algorithm, found.instead_of) == ("bytegrad", "gradient_allreduce")
    assert found.predicted_s < found.instead_of_predicted_s and found.measured_s > 0
    leader.await_line("trial 1 of study", "bytegrad is proposed: predicted ", "; it is tried")
    assert not leader.says("did not happen"), "a change of the algorithm costs no step"
    assert " and measured " in str(found).partition(found.instead_of)[0]
    for command in ("events", "tune"):
        assert str(found) in one.command(host, command), command
