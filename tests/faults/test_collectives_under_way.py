"""A rank of torch's own Gloo does not come to a collective: the command names it, from torch's flight recorder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_launch.main import cli
from tests.docs.printed import printed, printed_lines
from tests.docs.printed_lines import missing
from tests.faults.conftest import MakeJob
from tests.faults.job import START_S
from tests.lab.wait import eventually

SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
(out / f"holds-{rank}").touch()
while rank == 1 and not (out / "go").exists():
    time.sleep(0.02)
dist.all_reduce(torch.ones(1000))
dist.destroy_process_group()
"""


def test_the_rank_that_does_not_come_is_named(job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    script = tmp_path / "holds.py"
    script.write_text(SCRIPT)
    one = job(endpoints=etcd.endpoint, nodes="1", program=[str(script), str(tmp_path)])
    one.start(slots=2)
    eventually((tmp_path / "holds-1").exists, START_S, "rank 1 holds", 0.02)

    def asked(*words: str) -> str:
        return CliRunner().invoke(cli, ["collectives", "--etcd", etcd.endpoint, one.job_id, *words]).output

    def waiting() -> list[dict[str, Any]]:
        found = json.loads(asked("--json"))["waiting"]
        return found if isinstance(found, list) else []

    [found] = eventually(waiting, START_S, lambda: asked(), 0.1)
    assert (found["what"], found["number"], found["here"], found["absent"]) == ("all_reduce", 2, [0], [1])
    given = {"JOB": one.job_id, "ENDPOINTS": etcd.endpoint}
    text = CliRunner().invoke(cli, printed("docs/dashboard.md", "collectives", given)).output
    assert text.index("\nrank 0, slot 0 of ") < text.index("\nrank 1, slot 1 of ")
    text = asked("--rank", "1")
    assert text.startswith("Rank 0 waits in all_reduce number 2 (torch's group 0 (default_pg), gloo), for ")
    assert "Rank 1 has not begun it." in text and "1,000 elements" in text
    assert "has no rank 7" in asked("--rank", "7")
    assert (
        "no job 'other'" in CliRunner().invoke(cli, ["collectives", "--etcd", etcd.endpoint, "other"]).output
    )
    (tmp_path / "go").touch()
    one.finish()
    one.check_nothing_left()


LATE = """
import sys, time
from pathlib import Path
import torch
import bagua_core as bagua

out = Path(sys.argv[1])
bagua.init_process_group()
net = torch.nn.Linear(2560, 2560, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(net, [optimizer])
samples = torch.utils.data.TensorDataset(torch.randn(12, 2560))
for step, (x,) in enumerate(bagua.ElasticDataLoader(samples, global_batch_size=3)):
    if step == 2 and bagua.get_rank() == 1:
        (out / "is-late").touch()
        while not (out / "go").exists():
            time.sleep(0.02)
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""


def test_the_page_has_what_the_command_prints(job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    one = job(endpoints=etcd.endpoint, nodes="1", program=[str(script), str(tmp_path)])
    one.start(slots=3)
    eventually((tmp_path / "is-late").exists, START_S, "rank 1 is late", 0.02)
    given = {"JOB": one.job_id, "ENDPOINTS": etcd.endpoint}
    words = printed("docs/dashboard.md", "collectives", given)
    lines = printed_lines("docs/dashboard.md", "a rank that is late").splitlines()

    def asked() -> str:
        return CliRunner().invoke(cli, words).output

    eventually(
        lambda: missing(lines, asked()) == [], START_S, lambda: f"not printed: {missing(lines, asked())}", 0.2
    )
    (tmp_path / "go").touch()
    one.finish()
