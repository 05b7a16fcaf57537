"""Streaming DiLoCo in a job: workers are lost while an exchange is under way, and join; anchors end equal on all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.test_weight_algorithms import NEXT_STEP_BOUND_S

# Fragment 1 is sent in the steps 3, 9, 15 and applied in 6, 12, 18; fragment 0 is sent in 6, 12, 18 and applied in
# 9, 15, 21.
ARGUMENTS = {"sync_every": 6, "fragments": 2, "delay": 3}


def script(**more: Any) -> list[str]:
    arguments = json.dumps({**ARGUMENTS, **more})
    return ["--algorithm", "streaming_diloco", "--algorithm-arguments", arguments]


@pytest.mark.parametrize(
    ("point", "step", "more"),
    [
        # All have committed step 15, so all have sent fragment 1, which none applies before step 18.
        pytest.param("reduction.before", 16, {"compress": "int4"}, id="under way"),
        # Fragment 1 is applied provisionally, and fragment 0 under way.
        pytest.param("reduction.before", 18, {}, id="applied", marks=pytest.mark.long),
        # The step is final on the lost one, and maybe on others.
        pytest.param("reduction.done", 18, {"weighted_by": "samples"}, id="final", marks=pytest.mark.long),
    ],
)
def test_one_of_three_is_killed_while_an_exchange_is_under_way(
    job: MakeJob, point: str, step: int, more: dict[str, Any]
) -> None:
    one = job(script=script(**more))
    node = one.start(slots=3, failpoints=f"{point}=kill@{step}#1")
    node.await_line(f"bagua failpoint {point} fired: kill at step {step}")
    node.await_line("ended: killed by SIGKILL; starting another")
    alone = one.await_world(2, after_step=step)
    one.measured(
        "streaming_diloco: worker lost, next step", one.largest_gap_s(step - 2, alone), NEXT_STEP_BOUND_S
    )
    one.await_world(3, after_step=alone)
    one.finish()
    one.check(finished=3)
    dropped = sorted(end["dropped"] for end in one.ends())
    assert dropped[1] >= 1, f"an exchange was under way on both survivors: {dropped}"


@pytest.mark.long
def test_a_host_joins_and_one_is_lost(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", script=script(compress="int4"))
    first = one.start(lab.hosts[1])
    one.await_step(12)
    second = one.start(lab.hosts[2])
    both = one.await_world(2)
    assert not first.missed_a_peer and not second.missed_a_peer, "a join costs no step"
    one.await_step(both + 6)  # so late in the job every step lasts a second
    first.kill_agent()
    second.await_line("lost", "1 worker on 1 node")
    alone = one.await_world(1, after_step=one.last_world(2))
    one.await_step(alone + 6)
    one.start(lab.hosts[1])
    one.await_world(2, after_step=alone)
    one.finish([-9, 0, 0])
    one.check(finished=2)
