"""The command lines of torchrun's batch scripts: the endpoint is a host's name, to which the others connect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.lab.namespaces import ETC_NETNS_DIR


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


def test_a_name_that_dns_learns_late_is_waited_for(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    first, late = lab.hosts
    hosts_file = ETC_NETNS_DIR / late.namespace / "hosts"
    known = hosts_file.read_text()
    hosts_file.write_text("127.0.0.1 localhost\n")
    one = job(nodes="2", samples=1200)
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.name}:29622"]
    for host in lab.hosts:
        one.start(host, options=options)
    one.nodes[1].await_line("its name can't be resolved", "trying for up to 600 s")
    hosts_file.write_text(known)
    one.await_world(2)
    one.finish()
    one.check(finished=2)
    assert one.nodes[1].says("etcd answers")


OWN_STORE = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group(
    "gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
)
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {os.environ['RANK']} of {int(total)} that met", flush=True)
dist.destroy_process_group()
"""


def test_the_master_port_is_the_scripts(job: MakeJob, make_lab: MakeLab, tmp_path: Path) -> None:
    """A script that names the master's address itself finds its port free."""
    lab = make_lab(2)
    first = lab.hosts[0]
    script = tmp_path / "own_store.py"
    script.write_text(OWN_STORE)
    one = job(nodes="2", program=[str(script), f"tcp://{first.address}:29622"])
    ranks = [1, 0]  # the one that hosts nothing comes first
    for rank in ranks:
        options = ["--master-addr", first.name, "--master-port", "29622", "--node-rank", str(rank)]
        one.start(lab.hosts[rank], options=options)
    one.finish()
    assert all(node.says(f"rank {rank} of 2 that met") for rank, node in zip(ranks, one.nodes, strict=True))
