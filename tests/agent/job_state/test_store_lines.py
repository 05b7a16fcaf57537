"""What the terminal shows of the job's etcd when a node has opened it."""

from __future__ import annotations

import pytest

from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.job_state.store_lines import joining_command, store_opened


def test_the_line_that_joins_can_be_typed() -> None:
    command = WorkerCommand(CommandKind.EXECUTABLE, "./train", ("--name", "a b"))
    text = joining_command("10.0.0.1:2379", "demo", "2:4", 8, str(command))
    line = text.splitlines()[1].strip()
    assert line == (
        "bagua-launch --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint 10.0.0.1:2379 --rdzv-id demo "
        "--no-python ./train --name 'a b'"
    )
    one = joining_command("10.0.0.1:2379", "demo", "2:4", 1, "train.py --lr 0.1")
    assert "--nnodes 2:4 --rdzv-endpoint 10.0.0.1:2379 --rdzv-id demo train.py --lr 0.1" in one


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_store_that_other_hosts_cannot_reach_is_said(host: str) -> None:
    config = JobConfig("demo", WorkerCommand(CommandKind.SCRIPT, "train.py"), max_nodes=2)
    said = "\n".join(store_opened(config, f"{host}:29400", hosts_for_others=True, exposed=False))
    assert "other agents on this host join with:" in said and "other nodes join with" not in said
    assert f"other hosts can't reach {host}:29400" in said and "--rdzv-endpoint HOST:PORT" in said
    far = "\n".join(store_opened(config, "10.0.0.1:29400", hosts_for_others=True, exposed=True))
    assert "other nodes join with:" in far and "can't reach" not in far and "without TLS" in far
