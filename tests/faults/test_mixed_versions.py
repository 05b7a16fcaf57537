"""Agents of two versions that speak two protocols: the later one is refused with what to do, and the job goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bagua_contract.records import PROTOCOL_VERSION
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, ROOT
from tests.lab.zygote import REAL_START_VARIABLE

NEXT = PROTOCOL_VERSION + 1


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, str]]:
    """What makes every process of a node one of the version that speaks this protocol."""
    monkeypatch.setenv(REAL_START_VARIABLE, "1")  # the zygote's workers are of this version
    directory = tmp_path / "next-version"
    directory.mkdir()
    lines = f"import bagua_contract.records as records\nrecords.PROTOCOL_VERSION = {NEXT}\n"
    (directory / "sitecustomize.py").write_text(lines)
    paths = [str(directory), str(ROOT), str(ROOT / "protos")]
    return {PROTOCOL_VERSION: {}, NEXT: {"PYTHONPATH": os.pathsep.join(paths)}}


@pytest.mark.parametrize(("older", "newer"), [(PROTOCOL_VERSION, NEXT), (NEXT, PROTOCOL_VERSION)])
def test_another_version_is_refused_and_the_job_goes_on(
    job: MakeJob, make_lab: MakeLab, environments: dict[int, dict[str, str]], older: int, newer: int
) -> None:
    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    first = one.start(lab.hosts[0], environment=environments[older])
    one.await_step(5)
    second = one.start(lab.hosts[1], environment=environments[newer])
    assert second.process.wait(DEADLINE_S) == 2
    assert second.says(f"runs protocol {older}, this bagua speaks {newer}; install the job's version"), (
        second.log
    )
    assert "Traceback" not in second.log
    one.await_step(one.step + 5)
    one.finish([0, 2])
    one.check(finished=1)
    assert not first.missed_a_peer and {x.world_size for x in one.ledger.lines} == {1}
