"""The worlds of the tests: a rank that fails is named, also where another one waits for it."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.communicator import Communicator
from tests.core.communication import worlds


def test_the_rank_that_failed_is_named_and_not_the_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "DEADLINE_S", 0.5)

    def act(member: Communicator) -> None:
        if member.global_rank == 1:
            raise RuntimeError("rank 1 failed")
        member.allreduce(torch.ones(1)).wait()

    with pytest.raises(RuntimeError, match="rank 1 failed"):
        worlds.run_ranks(worlds.in_process_world(2), act)
