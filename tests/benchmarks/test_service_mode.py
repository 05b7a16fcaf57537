"""Short forms of the benchmarks of service mode: they run, and what they show holds for a small cluster too."""

from __future__ import annotations

import pytest

from benchmarks import cluster_scale, scale_effect, submit_start
from tests.lab import namespaces


def test_decisions_for_a_small_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster_scale.main(["--nodes", "30", "--jobs", "6", "--changes", "2"]) == 0
    told = capsys.readouterr().out
    for change in ("6 jobs submitted at once", "one job submitted", "scaled up", "drained", "ended"):
        assert change in told
    assert "Messages of a node in all 15 changes" in told  # 6, the first, and 2 of each kind


def test_more_changes_than_jobs_are_refused() -> None:
    with pytest.raises(SystemExit):
        cluster_scale.main(["--nodes", "30", "--jobs", "5", "--changes", "2"])


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_a_submitted_job_starts_about_as_soon(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    # one trial on a machine that may be busy: whether the bound holds is the benchmark's to say
    assert submit_start.main(["--repeat", "1"]) in (0, 1)
    told = capsys.readouterr().out
    assert "in the foreground" in told and "later by" in told


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_scaling_takes_effect(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    assert scale_effect.main(["--repeat", "1"]) == 0
    told = capsys.readouterr().out
    assert "scaled from one node to two" in told and "scaled from two nodes to one" in told
