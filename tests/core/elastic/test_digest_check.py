"""Ranks whose parameters differ find it out, all of them, and the message says where to look."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.communicator import CollectiveFailed, Pending
from bagua_core.communication.in_process import InProcessCommunicator, build_in_process
from bagua_core.elastic.digest_check import DigestCheck, Diverged
from tests.core.communication.worlds import run_ranks


def wait(pending: Pending) -> None:
    pending.wait()


def parameters(change: float = 0.0) -> list[torch.Tensor]:
    made = [torch.linspace(0, 1, 101).reshape(1, 101), torch.zeros(0), torch.arange(7, dtype=torch.float64)]
    made[2][3] += change
    return made


def test_it_is_due_every_so_many_steps() -> None:
    assert [s for s in range(1, 10) if DigestCheck(3).is_due(s)] == [3, 6, 9]
    assert [s for s in range(1, 4) if DigestCheck(1).is_due(s)] == [1, 2, 3]
    assert not any(DigestCheck(0).is_due(s) for s in range(10))


def test_equal_parameters_pass() -> None:
    world = build_in_process(3)
    run_ranks(world, lambda c: DigestCheck(1).compare(c, parameters(), 1, wait))


def test_every_rank_names_the_odd_ones_and_the_steps() -> None:
    world = build_in_process(4, generation=6)
    changed = {2: 2**-50}

    def act(communicator: InProcessCommunicator) -> str:
        check = DigestCheck(10)
        check.compare(communicator, parameters(), 10, wait)
        with pytest.raises(Diverged) as caught:
            check.compare(communicator, parameters(changed.get(communicator.global_rank, 0.0)), 20, wait)
        return str(caught.value)

    messages = run_ranks(world, act)
    assert len(set(messages)) == 1
    assert "differ after step 20 (they agreed after step 10): global ranks [2] differ" in messages[0]
    assert "in generation 6" in messages[0] and "--digest-every 1" in messages[0]


def test_where_ranks_are_of_two_minds_all_name_the_same_ones() -> None:
    world = build_in_process(2)

    def act(communicator: InProcessCommunicator) -> str:
        with pytest.raises(Diverged) as caught:
            DigestCheck(1).compare(communicator, parameters(float(communicator.global_rank)), 1, wait)
        return str(caught.value)

    assert len(set(run_ranks(world, act))) == 1


@pytest.mark.parametrize("bits", [0, 1, 31])
def test_one_flipped_bit_is_enough(bits: int) -> None:
    world = build_in_process(2)

    def act(communicator: InProcessCommunicator) -> None:
        held = parameters()
        if communicator.global_rank == 1:
            held[0].view(torch.int32)[0, 50] ^= torch.tensor(
                1 << bits if bits < 31 else -(1 << 31), dtype=torch.int32
            )
        with pytest.raises(Diverged):
            DigestCheck(1).compare(communicator, held, 1, wait)

    run_ranks(world, act)


def test_a_comparison_that_could_not_be_made_is_no_divergence() -> None:
    world = build_in_process(2)
    world[1].lose("10.0.0.2")
    with pytest.raises(CollectiveFailed, match=r"10\.0\.0\.2"):
        DigestCheck(1).compare(world[0], parameters(), 1, wait)
