"""Agents of two versions that speak two protocols: the later one is refused with what to do, and the job goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bagua_contract.records import PROTOCOL_VERSION
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, ROOT, Node
from tests.lab.network import Host
from tests.lab.zygote import REAL_START_VARIABLE

NEXT = PROTOCOL_VERSION + 1


@pytest.fixture
def environments(tmp_path: Path) -> dict[int, dict[str, str]]:
    """What makes every process of a node one of the version that speaks this protocol."""
    directory = tmp_path / "next-version"
    directory.mkdir()
    lines = f"import bagua_contract.records as records\nrecords.PROTOCOL_VERSION = {NEXT}\n"
    (directory / "sitecustomize.py").write_text(lines)
    paths = [str(directory), str(ROOT), str(ROOT / "protos")]
    return {PROTOCOL_VERSION: {}, NEXT: {"PYTHONPATH": os.pathsep.join(paths)}}


@pytest.mark.parametrize(("older", "newer"), [(PROTOCOL_VERSION, NEXT), (NEXT, PROTOCOL_VERSION)])
def test_another_version_is_refused_and_the_job_goes_on(
    job: MakeJob,
    make_lab: MakeLab,
    monkeypatch: pytest.MonkeyPatch,
    environments: dict[int, dict[str, str]],
    older: int,
    newer: int,
) -> None:
    def start(host: Host, version: int) -> Node:
        with monkeypatch.context() as starting:
            if version == NEXT:
                starting.setenv(REAL_START_VARIABLE, "1")  # the zygote's workers are of this version
            return one.start(host, environment=environments[version])

    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    first = start(lab.hosts[0], older)
    one.await_step(5)
    second = start(lab.hosts[1], newer)
    assert second.process.wait(DEADLINE_S) == 2
    assert second.says(f"runs protocol {older}, this bagua speaks {newer}; install the job's version"), (
        second.log
    )
    assert "Traceback" not in second.log
    one.await_step(one.step + 5)
    one.finish([0, 2])
    one.check(finished=1)
    assert not first.missed_a_peer and {x.world_size for x in one.ledger.lines} == {1}
