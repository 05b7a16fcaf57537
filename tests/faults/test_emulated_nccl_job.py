"""Jobs whose gradients travel by NCCL, emulated between their processes: faults cost them what they cost others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, Job, Node
from tests.faults.scraped_metrics import get, port_of, scrape
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("train_over_emulated_nccl.py")
BY_NCCL = "bagua: tensors of GPUs travel by NCCL 2.27.7"


def over_nccl(job: MakeJob, **keywords: Any) -> Job:
    """train.py with the emulation."""
    return job(file=SCRIPT, **keywords)


def allreduces(*nodes: Node) -> list[int]:
    """Of each worker that reached the end."""
    lines = [line for node in nodes for line in node.log.splitlines() if "emulated NCCL: did " in line]
    return [int(line.partition(" did ")[2].split()[0]) for line in lines]


def test_a_worker_is_killed_and_another_comes_in(job: MakeJob) -> None:
    one = over_nccl(job)
    node = one.start(slots=2)
    one.await_step(20)
    assert node.says(BY_NCCL)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check(finished=2)
    done = allreduces(node)
    assert len(done) == 2 and max(done) >= one.ledger.steps, "gradients went by NCCL in every step"


def test_the_gradients_that_go_by_nccl_are_counted(job: MakeJob) -> None:
    one = over_nccl(job, options=["--metrics-port", "0"])
    node = one.start(slots=2)
    port = port_of(node)

    def ratios() -> dict[tuple[str, ...], float]:
        return scrape(port, "bagua_compression_ratio", "slot", "algorithm")

    slots = {("0", "gradient_allreduce"), ("1", "gradient_allreduce")}
    eventually(lambda: ratios().keys() == slots, DEADLINE_S, lambda: get(port, "/metrics"), 0.1)
    one.await_step(40)
    sent = scrape(port, "bagua_sent_bytes_total", "slot", "algorithm")
    assert sent.keys() == slots and all(sent.values())
    # The first model's copy and the votes on steps count too
    assert list(ratios().values()) == pytest.approx([1, 1], rel=0.2)
    one.finish()
    one.check(finished=2)
    assert node.says(BY_NCCL)


def test_a_newcomer_that_dies_while_it_joins_nccl_costs_no_step(job: MakeJob) -> None:
    one = over_nccl(job)
    node = one.start(slots=2)
    one.await_step(20)
    (one.out / "dies-1").touch()
    node.workers[1].kill()
    alone = one.await_world(1)
    node.await_line("emulated NCCL: dies while it joins")
    undone = sum("did not happen" in line for line in node.log.splitlines())
    one.await_world(2, after_step=alone)
    assert (one.out / "died-1").exists()
    assert sum("did not happen" in line for line in node.log.splitlines()) == undone
    one.finish()
    one.check(finished=2)


@pytest.mark.long
def test_a_node_that_is_lost_in_the_middle_of_it(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    one = over_nccl(job, endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    nodes = [one.start(lab.hosts[1])]
    nodes[0].await_line("this node leads")
    nodes.append(one.start(lab.hosts[2]))
    one.await_world(2, after_step=9)
    lab.hosts[2].power_off()
    one.await_world(1, after_step=one.step)
    one.finish([0, -9])
    one.check(finished=1)
    assert nodes[0].says(BY_NCCL)


@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [
        ("bytegrad", "{}"),
        pytest.param("decentralized", "{}", marks=pytest.mark.long),
        pytest.param("gradient_allreduce", '{"hierarchical": true}', marks=pytest.mark.long),
        pytest.param("low_precision_decentralized", "{}", marks=pytest.mark.long),
    ],
)
def test_other_algorithms_take_it_too(job: MakeJob, algorithm: str, arguments: str) -> None:
    script = ["--algorithm", algorithm, "--algorithm-arguments", arguments]
    one = over_nccl(job, script=script)
    node = one.start(slots=2)
    one.await_step(10)
    node.workers[1].kill()
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check(finished=2)
    assert node.says(BY_NCCL)


def test_one_worker_that_says_gloo_takes_all_there(job: MakeJob) -> None:
    one = over_nccl(job, samples=1200)
    node = one.start(slots=2, environment={"BAGUA_TRANSPORT": "gloo"})
    one.await_step(5)
    one.finish()
    one.check(finished=2)
    assert allreduces(node) == [0, 0] and not node.says("travel by")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "nccl",
            "BAGUA_TRANSPORT=nccl (global ranks [0, 1]) can't be: global ranks [0, 1] had nothing on a GPU",
        ),
        ("tcp", "BAGUA_TRANSPORT='tcp' is none of auto, gloo, nccl"),
    ],
)
def test_what_cannot_be_ends_the_job_with_the_reason(job: MakeJob, said: str, words: str) -> None:
    one = job(options=["--max-restarts", "0"])
    node = one.start(slots=2, environment={"BAGUA_TRANSPORT": said})
    one.finish([1])
    assert node.says(words)
    one.check_nothing_left()
