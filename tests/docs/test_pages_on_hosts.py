"""Commands of the manual that jobs of several nodes are started with run on lab hosts, as they are printed.

An endpoint stands for the lab's etcd, `train.py` for a script of the fault tests.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.docs.printed import printed
from tests.faults.conftest import MakeJob, MakeLab, job, make_lab
from tests.faults.job import DEADLINE_S, SCRIPT, Job, Node
from tests.lab.network import Host
from tests.lab.wait import eventually

__all__ = ["job", "make_lab"]

DETERMINISTIC = SCRIPT.with_name("train_deterministic.py")
JOINS = re.compile(r"other nodes join with:\s+bagua-launch (.*)")
FOUR_SAMPLES_A_SHARD = ("--batch", "64")


def test_later_nodes_join_and_the_job_is_scaled_from_anywhere(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    etcd = lab.etcd(lab.hosts[0])
    given = {"10.0.0.1:2379": etcd.endpoints}
    *options, script = printed("README.md", "--nnodes 2:8 --rdzv-endpoint", given)
    assert [*options, script] == printed("docs/guide/ssh.md", "--nnodes 2:8 --rdzv-endpoint", given)
    one = job(options=options)
    first, _ = (one.start(host) for host in lab.hosts[:2])
    one.await_world(2)
    scale = printed("README.md", "scale", given)
    assert scale[0] == "scale"
    one.run(lab.hosts[2], *scale)
    first.await_line("wanted now: 2 to 4 nodes, instead of 2 to 8 nodes")
    one.start(lab.hosts[2])
    one.await_world(3)
    one.finish()
    one.check(finished=3)


def joined_as_said(one: Job, first: Node, host: Host) -> Node:
    """A node on `host`, by the command that `first` prints."""
    found = eventually(lambda: JOINS.search(first.log), DEADLINE_S, lambda: first.log)
    return one.launch(host, shlex.split(found[1]))


@pytest.mark.parametrize("page", ["README.md", "docs/deterministic.md"])
def test_without_an_endpoint_the_first_node_prints_the_command_that_joins(
    job: MakeJob, make_lab: MakeLab, page: str
) -> None:
    lab = make_lab(2)
    first_host, other = lab.hosts
    if page == "README.md":
        options = printed("README.md", "--nnodes 2:8 train.py")[:-1]
        one = job(options=options)
    else:
        options = printed("docs/deterministic.md", "--virtual-shards 16", {"2": "1"})[:-1]
        one = job(options=options, file=DETERMINISTIC, script=FOUR_SAMPLES_A_SHARD, samples=512)
    # the lab's hosts have no default route, which shows a node its address
    first = one.start(first_host, options=["--local-addr", first_host.address])
    joined_as_said(one, first, other)
    one.await_world(2)
    one.finish()
    one.check(finished=2)
    if page == "docs/deterministic.md":
        assert [end["shards"] for end in one.ends()] == ["16", "16"]


def test_a_job_waits_for_its_start_size(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    given = {"10.0.0.1:2379": lab.etcd(lab.hosts[0]).endpoints, "train.py": str(SCRIPT)}
    *options, script = printed("docs/training-script.md", "--sizes 2,4,8", given)
    one = job(options=options, file=Path(script), samples=240)
    one.hurry()
    first = one.start(lab.hosts[0])
    first.await_line("this node leads")  # the leader says what the job waits for
    for host in lab.hosts[1:3]:
        one.start(host)
    first.await_line("waiting: 3 of 4 nodes")
    one.start(lab.hosts[3])
    one.finish()
    one.check(finished=4)
    assert {line.world_size for line in one.ledger.lines} == {4}


def test_a_job_on_two_nodes_is_tuned_with_the_default_times(job: MakeJob, make_lab: MakeLab) -> None:
    pytest.importorskip("optuna")
    lab = make_lab(2)
    etcd = lab.etcd(lab.hosts[0])
    given = {"etcd-1:2379": etcd.endpoints, "train.py": str(SCRIPT)}
    *options, script = printed("docs/autotuning.md", "--nnodes 2:8", given)
    one = job(options=options, file=Path(script), samples=240)
    one.hurry()
    for host in lab.hosts:
        one.start(host)
    one.finish()
    one.check(finished=2)
    records = [change.value for change in etcd.history(JobKeys("demo").spec) if change.value is not None]
    tuned = pb.JobSpec.FromString(records[-1]).autotune
    assert (tuned.level, tuned.max_samples, tuned.confidence_s, tuned.warmup_s) == (1, 60, 5.0, 30.0)
