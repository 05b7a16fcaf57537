"""The weighted mean of pseudo-gradients: equal bits on all ranks, and compressed nothing is lost for good."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.compressed import fragment_mean
from bagua_core.communication.compressed.compressor import with_feedback
from bagua_core.communication.compressed.fragment_mean import Feedback, weighted_mean
from tests.core.communication.worlds import in_process_world, run_ranks

SIZES = (700, 3)
WEIGHTS = (1.0, 0.0, 3.0)


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def mean_of(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    shares = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    return [
        torch.stack([s * t for s, t in zip(shares, of_one, strict=True)]).sum(0)
        for of_one in zip(*parts, strict=True)
    ]


def test_uncompressed_it_is_the_weighted_mean() -> None:
    def act(lane: Communicator) -> list[torch.Tensor]:
        gradients = draw(lane.global_rank)
        weighted_mean(lane, gradients, WEIGHTS[lane.global_rank])
        return gradients

    found = run_ranks(in_process_world(3), act)
    for one, wanted in zip(found[0], mean_of([draw(r) for r in range(3)]), strict=True):
        torch.testing.assert_close(one, wanted)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["minmax_uint8", "minmax_int4"])
def test_what_compression_loses_is_left_for_the_next_exchange(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means and what is left at last are the sum of all contributions, although the work went in uneven pieces."""
    monkeypatch.setattr(fragment_mean, "_PIECE_VALUES", 256)
    rounds = 4

    def act(lane: Communicator) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        form, errors, means = with_feedback(name), [torch.zeros(size) for size in SIZES], []
        for number in range(rounds):
            gradients, left = draw(10 * number + lane.global_rank), [torch.zeros(size) for size in SIZES]
            kept = [error.clone() for error in errors]
            weighted_mean(lane, gradients, WEIGHTS[lane.global_rank], Feedback(form, errors, left))
            assert all(torch.equal(a, b) for a, b in zip(kept, errors, strict=True)), "a drop forgets nothing"
            errors = left
            means.append(gradients)
        return means, errors

    found = run_ranks(in_process_world(3), act)
    for means, _ in found[1:]:
        for one, other in zip(found[0][0], means, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    exact = [mean_of([draw(10 * number + r) for r in range(3)]) for number in range(rounds)]
    for place in range(len(SIZES)):
        arrived = sum(means[place] for means in found[0][0])
        left = sum(errors[place] for _, errors in found)
        wanted = sum(means[place] for means in exact)
        torch.testing.assert_close(arrived + left, wanted, rtol=1e-4, atol=1e-5)
        if SIZES[place] > len(WEIGHTS):
            assert not torch.allclose(torch.as_tensor(arrived), torch.as_tensor(wanted)), (
                "nothing was compressed"
            )


@pytest.mark.parametrize(("name", "bits"), [("minmax_uint8", 8.2), ("minmax_int4", 4.4)])
def test_bytes_on_the_wire(name: str, bits: float) -> None:
    """Of two ranks each sends half of its values and half of the sum."""
    size, sent = 100_000, [0]
    world = in_process_world(2)
    own = world[0]
    alltoall, allgather = own.alltoall, own.allgather

    def counted_alltoall(output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        sent[0] += tensor[1].nbytes
        return alltoall(output, tensor)

    def counted_allgather(output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        sent[0] += tensor.nbytes
        return allgather(output, tensor)

    own.alltoall, own.allgather = counted_alltoall, counted_allgather  # type: ignore[method-assign]

    def act(lane: Communicator) -> None:
        zero, left = [torch.zeros(size)], [torch.zeros(size)]
        weighted_mean(lane, [torch.randn(size)], 1.0, Feedback(with_feedback(name), zero, left))

    run_ranks(world, act)
    assert 0 < sent[0] * 8 / size <= bits, sent
