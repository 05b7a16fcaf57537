"""A worker's statement about its NCCL: read from the machine, without an unneeded use of CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_core.communication.nccl import nccl_ability, nccl_join, nccl_library
from bagua_core.communication.nccl.nccl_library import Nccl, NcclUnavailableError
from bagua_core.communication.transport_choice import AUTO, GLOO, Statement
from bagua_core.communication.transports import gpu_transport
from bagua_core.communication.transports.gpu_in_use import gpus_of

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with NCCL; change what it holds before asking."""
    machine: dict[str, Any] = {"version": 23004, "bounded": True}
    module = SimpleNamespace(get_version=lambda: machine["version"])
    monkeypatch.setattr(nccl_library, "load", lambda: Nccl(module))
    monkeypatch.setattr(nccl_library, "loaded_library", lambda: None)
    monkeypatch.setattr(nccl_join, "can_be_given_up", lambda nccl, library: machine["bounded"])
    monkeypatch.setattr(nccl_ability, "gpu_address", lambda device: f"0000:0{device.index}:00")
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    return machine


def no_loading() -> Nccl:
    raise AssertionError("CuPy is imported without need")


@pytest.mark.parametrize("setting", [AUTO, GLOO, "nccl"])
def test_a_script_without_a_gpu_does_not_even_import_cupy(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_library, "load", no_loading)
    transports = [gpu_transport.NcclTransport()]
    assert gpu_transport.statement(setting, (), transports) == Statement(setting)
    assert gpu_transport.statement(GLOO, (GPU,), transports) == Statement(GLOO, True)


def test_what_is_missing_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Nccl:
        raise NcclUnavailableError("NCCL is used through CuPy; install bagua-elastic[cuda12]")

    monkeypatch.setattr(nccl_library, "load", missing)
    said = nccl_ability.ability((GPU,))
    assert said.obstacle.endswith("install bagua-elastic[cuda12]")


def test_what_joins_without_a_bound_is_not_used(able: dict[str, Any]) -> None:
    able.update(bounded=False, version=21304)
    said = nccl_ability.ability((GPU,))
    assert "could not be given up with NCCL 21304" in said.obstacle


def test_models_on_several_gpus_go_by_gloo(able: dict[str, Any]) -> None:
    said = nccl_ability.ability((GPU, OTHER))
    assert "cuda:0, cuda:1; run one worker for each GPU" in said.obstacle


def test_a_gpu_has_one_name_on_its_host_and_another_where_nccl_is_told_so(
    able: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = nccl_ability.ability((GPU,))
    assert here.facts["version"] == "23004" and not here.obstacle and not here.facts["may_share"]
    assert nccl_ability.ability((OTHER,)).facts["gpu"] != here.facts["gpu"]
    assert nccl_ability.against([here.facts, nccl_ability.ability((GPU,)).facts]) is not None
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert nccl_ability.against([here.facts, nccl_ability.ability((GPU,)).facts]) is None


@pytest.mark.parametrize(("version", "shares"), [(22707, False), (23000, True)])
def test_several_ranks_share_a_gpu_where_nccl_is_told_to_let_them_and_can(
    able: dict[str, Any], monkeypatch: pytest.MonkeyPatch, version: int, shares: bool
) -> None:
    able["version"] = version
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert nccl_ability.ability((GPU,)).facts["may_share"] == ("yes" if shares else "")


# -- which GPU that is


def test_a_process_that_has_not_used_cuda_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("it would make a context"))
    assert gpus_of([]) == gpus_of([torch.ones(1)]) == ()


def test_models_say_which_and_without_any_the_current_one_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def on(device: torch.device | str) -> Any:
        return SimpleNamespace(device=torch.device(device))

    assert gpus_of([]) == (OTHER,)
    assert gpus_of([on("cpu")]) == ()
    assert gpus_of([on("cpu"), on(GPU), on(GPU)]) == (GPU,)
    assert gpus_of([on(OTHER), on(GPU)]) == (GPU, OTHER)


@pytest.mark.gpu
def test_a_real_gpu_has_an_address() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert nccl_ability.gpu_address(GPU) == nccl_ability.gpu_address(GPU) != ""
