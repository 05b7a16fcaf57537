"""The user's script raises: the job ends with its exit code, or goes on as long as its budget lasts."""

from __future__ import annotations

from pathlib import Path

from tests.faults.conftest import MakeJob, MakeLab


def test_a_script_that_raises_fails_the_job_with_its_exit_code(job: MakeJob) -> None:
    one = job(script=["--raise-at", "5", "--raise-in-slot", "1"])
    node = one.start(slots=2)
    assert node.process.wait(60) == 1
    node_line = next(line for line in node.log.splitlines() if "first failure:" in line)
    for words in ("slot 1", "global rank 1", "exit code 1"):
        assert words in node_line
    directory = Path(node_line.rpartition("files in ")[2])
    assert "a bad sample in step 5" in (directory / "error.json").read_text()
    assert node.says("ValueError: a bad sample in step 5"), "the cause is on the terminal"
    assert node.log.count("Traceback (most recent call last)") == 1, "and its traceback, once"
    one.check_nothing_left()


def test_a_script_that_raises_once_is_started_again(job: MakeJob) -> None:
    one = job(script=["--raise-at", "5", "--raise-in-slot", "1"], options=["--max-restarts", "1"])
    node = one.start(slots=2)
    node.await_line("worker in slot 1 ended: ValueError: a bad sample in step 5; starting another")
    alone = one.await_world(1)
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)


def test_a_script_that_raises_on_one_node_fails_the_job_on_all(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="2:2", script=["--raise-at", "5"])
    nodes = [one.start(host) for host in lab.hosts]
    for node in nodes:
        assert node.process.wait(60) == 1
        assert node.says("first failure:", "exit code 1")
        assert node.says("ValueError: a bad sample in step 5")
    one.check_nothing_left()


def test_joiners_that_raise_in_their_first_step_do_not_end_the_job(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one = job(
        endpoints=lab.etcd(lab.hosts[0]).endpoints,
        nodes="1:2",
        script=["--failpoints-once"],
        options=["--max-restarts", "2"],
    )
    one.start(lab.hosts[0])
    alone = one.await_step(10)
    joiner = one.start(lab.hosts[1], slots=2, failpoints="step.begin=raise")
    for slot in range(2):
        joiner.await_line(f"worker in slot {slot} ended: ", "FailpointRaised", "; starting another")
    one.await_world(3, after_step=alone)
    one.finish()
    one.check(finished=3)
