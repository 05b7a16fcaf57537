"""A fused optimizer in an elastic job: it commits, is undone with a failed step, and travels to joiners."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob

SCRIPT = Path(__file__).with_name("fused_job.py")
SAMPLES, EPOCHS = 1800, 4


@pytest.mark.parametrize(
    ("fuse_first", "environment"),
    [
        pytest.param(True, {}, id="fused, then wrapped"),
        pytest.param(
            False,
            {"BAGUA_STAGING_BYTES": "0"},
            id="wrapped, then fused, healed in place",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_worker_is_killed_in_a_step(job: MakeJob, fuse_first: bool, environment: dict[str, str]) -> None:
    words = [
        str(SCRIPT),
        "--samples",
        str(SAMPLES),
        "--epochs",
        str(EPOCHS),
        *(["--fuse-first"] * fuse_first),
    ]
    one = job(samples=SAMPLES, epochs=EPOCHS, program=words)
    words += ["--out", str(one.out)]
    node = one.start(slots=2, failpoints="reduction.before=kill@25#1", environment=environment)
    node.await_line("ended: killed by SIGKILL; starting another")
    assert one.await_world(1, after_step=20) > 25
    node.await_line("did not happen")
    one.await_world(2, after_step=26)
    one.finish()
    one.check(finished=2)
    for end in one.ends():
        assert end["members"] == 8, "all parameters shared a block to the end"
        assert end["in_one_bucket"] and not end["gradients_copied"], (
            "gradients were used as they lie in the bucket"
        )
