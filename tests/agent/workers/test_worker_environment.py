"""torchrun's variables, name by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.node.environment_of_workers import EnvironmentOfWorkers
from bagua_agent.workers.start.worker_environment import TorchrunPlace, torchrun_variables

PLACE = TorchrunPlace(
    local_rank=1,
    global_rank=5,
    node_rank=2,
    local_world_size=2,
    world_size=6,
    node_count=3,
    master_addr="10.0.0.1",
    master_port=29500,
    run_id="demo",
    restart_count=1,
    max_restarts=4,
    role="trainer",
    error_file="/logs/error.json",
)


def test_every_variable() -> None:
    assert torchrun_variables(PLACE, {}) == {
        "LOCAL_RANK": "1",
        "RANK": "5",
        "GROUP_RANK": "2",
        "ROLE_RANK": "5",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "4",
        "TORCHELASTIC_RUN_ID": "demo",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(("port", "expected"), [(None, "29500"), (0, "29500"), (1234, "1234")])
def test_a_worker_of_no_generation_has_the_fixed_port_or_the_default_one(
    port: int | None, expected: str, tmp_path: Path
) -> None:
    config = JobConfig("demo", WorkerCommand(CommandKind.SCRIPT, "train.py"), master_port=port)
    made = EnvironmentOfWorkers(config, "a0", tmp_path, None, {})
    assert made.of_worker("w0", 0, tmp_path / "error", "10.0.0.1", None, 0)["MASTER_PORT"] == expected


def test_what_the_user_set_is_kept() -> None:
    environ = {"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "CUDA_VISIBLE_DEVICES": "4,5"}
    variables = torchrun_variables(PLACE, environ)
    assert {name: variables[name] for name in environ} == environ


def test_one_worker_keeps_its_threads() -> None:
    alone = dataclasses.replace(PLACE, local_rank=0, local_world_size=1)
    assert "OMP_NUM_THREADS" not in torchrun_variables(alone, {})


@pytest.mark.parametrize(("visible", "device"), [(None, "1"), ("4, 7", "7"), ("GPU-a,MIG-b", "MIG-b")])
def test_virtual_local_rank(visible: str | None, device: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    variables = torchrun_variables(PLACE, environ, virtual_local_rank=True)
    assert (variables["LOCAL_RANK"], variables["CUDA_VISIBLE_DEVICES"]) == ("0", device)


def test_too_few_devices_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=4 has no device for local rank 1"):
        torchrun_variables(PLACE, {"CUDA_VISIBLE_DEVICES": "4"}, virtual_local_rank=True)


def test_an_impossible_place_is_refused() -> None:
    with pytest.raises(ValueError, match="global rank 6"):
        dataclasses.replace(PLACE, global_rank=6)
