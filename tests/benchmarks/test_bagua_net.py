"""The comparison of NCCL's transports: its plans and medians, and a short run between two lab hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import bagua_net
from benchmarks.bagua_net import Condition, Measurement, better_baseline, plan
from tests.lab.wait import HANG_S


def test_better_baseline_is_the_best_median_of_the_own_settings() -> None:
    def one(system: str, speed: float) -> Measurement:
        return Measurement("1gbit", system, 1024, "stream", speed, 1.0)

    measured = [one("1x1", 1.0), one("1x1", 9.0), one("1x1", 2.0), one("2x8", 3.0), one("plugin", 8.0)]
    assert better_baseline(measured) == {("1gbit", 1024, "stream"): 3.0}


def test_plan_takes_about_as_long_for_every_size() -> None:
    slow = Condition("1gbit", delay_ms=10)
    assert plan(slow, 1024, "answered").messages == 7  # a round trip of 20 ms each
    assert plan(slow, 1024, "answered").acknowledge_every == 1
    assert plan(slow, 1024, "stream").messages == bagua_net.MOST_MESSAGES
    assert plan(slow, 256 * 1024 * 1024, "stream").messages == 1
    assert plan(slow, 1024, "cpu").nap_us > 0
    lossy = Condition("1gbit", delay_ms=10, loss=0.01)
    assert plan(lossy, 64 * 1024, "stream").messages < plan(slow, 64 * 1024, "stream").messages


def test_rest_is_no_baseline() -> None:
    measured = [Measurement("1gbit", "1x4", 0, "rest", 0.0, 0.01)]
    assert better_baseline(measured) == {}


@pytest.mark.usefixtures("nccl_on_lab_hosts")
def test_quick_run_prints_a_row_for_each_size_and_mode() -> None:
    argv = [sys.executable, "-m", "benchmarks.bagua_net", "--quick"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    for row in ("| 1 KB    | answered", "| 1 KB    | stream", "| 1024 KB | answered", "| 1024 KB | stream"):
        assert row in done.stdout
    assert "Processor seconds per GB" in done.stdout
    assert "At rest, processor seconds per second" in done.stdout
