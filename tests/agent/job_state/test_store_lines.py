"""What the terminal shows of the job's etcd when a node has opened it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.job_state.store_lines import joining_command, store_opened

SCRIPT = WorkerCommand(CommandKind.SCRIPT, "train.py")


def test_the_line_that_joins_can_be_typed() -> None:
    command = WorkerCommand(CommandKind.EXECUTABLE, "./train", ("--name", "a b"))
    config = JobConfig("demo", command, min_nodes=2, max_nodes=4, slots=8)
    line = joining_command(config, "10.0.0.1:2379").splitlines()[1].strip()
    assert line == (
        "bagua-launch --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint 10.0.0.1:2379 --rdzv-id demo "
        "--no-python ./train --name 'a b'"
    )
    one = joining_command(replace(config, slots=1, command=SCRIPT), "10.0.0.1:2379")
    assert "--nnodes 2:4 --rdzv-endpoint 10.0.0.1:2379 --rdzv-id demo train.py" in one


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"replica_size": 2}, "--replica-size 2"),
        ({"replica_size": 0}, "--replica-size node"),
        ({"virtual_shards": 16}, "--deterministic --virtual-shards 16"),
        ({"ledger_dir": "a b", "digest_every_steps": 0}, "--ledger 'a b' --digest-every 0"),
        ({"checkpoint_dir": "/d"}, "--checkpoint-dir /d --checkpoint-every 60s"),
        ({"max_restarts": 3, "autotune_level": 1}, ""),  # the job's record has them
    ],
)
def test_the_line_that_joins_has_what_workers_of_all_nodes_need_alike(
    fields: dict[str, Any], options: str
) -> None:
    config = JobConfig("demo", SCRIPT, max_nodes=2, **fields)
    expected = f"--rdzv-id demo {options} train.py" if options else "--rdzv-id demo train.py"
    assert joining_command(config, "h1:2379").endswith(expected)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_store_that_other_hosts_cannot_reach_is_said(host: str) -> None:
    config = JobConfig("demo", SCRIPT, max_nodes=2)
    said = "\n".join(store_opened(config, f"{host}:29400", hosts_for_others=True, exposed=False))
    assert "other agents on this host join with:" in said and "other nodes join with" not in said
    assert f"other hosts can't reach {host}:29400" in said and "--rdzv-endpoint HOST:PORT" in said
    far = "\n".join(store_opened(config, "10.0.0.1:29400", hosts_for_others=True, exposed=True))
    assert "other nodes join with:" in far and "can't reach" not in far and "without TLS" in far
