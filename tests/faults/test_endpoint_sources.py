"""Nodes find the job's etcd without an endpoint on the command line, and train together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob, MakeLab


@pytest.mark.parametrize("source", ["variable", "configuration"])
def test_the_endpoint_comes_from_elsewhere(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path, source: str
) -> None:
    lab = make_lab(2)
    endpoints = lab.etcd(lab.hosts[0]).endpoints
    if source == "variable":
        environment = {"BAGUA_ETCD": endpoints}
    else:
        file = tmp_path / "launch.toml"
        file.write_text(f'rdzv-endpoint = "{endpoints}"\n')
        environment = {"BAGUA_CONFIG": str(file)}
    one = job(nodes="1:2", samples=1200)
    for host in lab.hosts:
        one.start(host, environment=environment)
    one.await_world(2)
    one.finish()
    one.check(finished=2)
    assert one.nodes[0].says("store", endpoints.split(",")[0])
