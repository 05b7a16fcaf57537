"""The command lines of torchrun's batch scripts: the endpoint is a host's name, to which the others connect."""

from __future__ import annotations

import pytest

from tests.faults.conftest import MakeJob, MakeLab


@pytest.mark.parametrize("how", ["c10d", "static"])
def test_nodes_meet_at_the_name_of_the_first(job: MakeJob, make_lab: MakeLab, how: str) -> None:
    lab = make_lab(2)
    first = lab.hosts[0]
    one = job(nodes="2", samples=1200)
    for rank, host in enumerate(lab.hosts):
        if how == "c10d":
            options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.name}:29622"]
        else:
            options = ["--master-addr", first.name, "--master-port", "29622", "--node-rank", str(rank)]
        one.start(host, options=options)
    one.await_world(2)
    one.finish()
    one.check(finished=2)
    assert one.nodes[0].says("the agents meet in an etcd that this node starts")
    assert one.nodes[1].says("another node starts")
