"""The worked examples of CONTRIBUTING.md run as they are printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_core.algorithms import GradientAllreduce
from bagua_core.communication.compressed import compressor
from bagua_core.communication.transports import by_device, gpu_transport
from bagua_core.communication.transports.staged import Staged
from tests.core.algorithms.gradient_ranks import Rank, assert_equal_bits, exact
from tests.core.communication.nccl_over_gloo import is_of_gpu
from tests.core.communication.worlds import gloo_world, run_ranks
from tests.core.elastic.membership.test_rendezvous_transports import Meeting, assert_reduces, of_gpu
from tests.docs.printed import printed_text


def defined(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), namespace)
    return namespace


def test_an_algorithm() -> None:
    made = defined(printed_text("CONTRIBUTING.md", "def majority"))["algorithm"]
    members = [Rank(c, made) for c in gloo_world(3)]
    run_ranks(members, lambda r: r.backward())
    assert_equal_bits([m.gradients() for m in members])
    _, parts = exact(Rank(None, GradientAllreduce()), 3)
    for place, got in enumerate(members[0].gradients()):
        wanted = torch.stack([of_rank[place].sign() for of_rank in parts]).sum(0).sign()
        assert torch.equal(got, wanted)


def test_a_compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressor, "COMPRESSORS", dict(compressor.COMPRESSORS))
    made = defined(printed_text("CONTRIBUTING.md", "class BFloat16"))
    assert compressor.COMPRESSORS["bfloat16"] is made["BFloat16"]
    members = [Rank(c, made["algorithm"]) for c in gloo_world(3)]
    for _ in range(2):
        run_ranks(members, lambda r: r.backward())
        assert_equal_bits([m.gradients() for m in members])
        wanted, _ = exact(Rank(None, GradientAllreduce()), 3)
        for got, want in zip(members[0].gradients(), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2**-6 * float(want.abs().max()))


def test_a_transport(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_transport, "TRANSPORTS", list(gpu_transport.TRANSPORTS))
    monkeypatch.setattr(by_device, "is_of_gpu", is_of_gpu)
    monkeypatch.delenv("SECOND_NETWORK_ADDRESS", raising=False)
    made = defined(printed_text("CONTRIBUTING.md", "class SecondNetwork"))["SecondNetwork"]
    registered = gpu_transport.TRANSPORTS[0]
    assert isinstance(registered, made)
    assert "is not set" in registered.ability((torch.device("cpu"),)).obstacle
    monkeypatch.setenv("SECOND_NETWORK_ADDRESS", "127.0.0.1")
    registered.gpus = (torch.device("cpu"),)  # what the script of a member of the meeting uses
    meeting = Meeting([registered, registered])
    try:
        world = meeting.built(1)
        assert all(isinstance(of_gpu(c), Staged) for c in world)
        assert_reduces(world)
    finally:
        meeting.close()
    assert "tensors of GPUs travel by the second network" in capfd.readouterr().err
