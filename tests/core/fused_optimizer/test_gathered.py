"""New gradients in one flat copy, whatever they are like; and back, where a step wrote to the copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bagua_core.fused_optimizer.flat_memory import Gathered
from bagua_core.kernels import targets

SHAPES = ((3, 5), (7,), (0, 4), (), (2, 3, 4, 5), (1,))


class Subclass(Tensor):
    pass


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 100).to(dtype)


def sliced(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every other element of its memory."""
    return values((*shape, 2), dtype)[..., 0]


def of_a_subclass(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return values(shape, dtype).as_subclass(Subclass)


def in_the_middle(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    return values((count + 3,), dtype)[3:].view(shape)


def gathered(dtype: torch.dtype) -> tuple[Gathered, Tensor]:
    counts = [torch.Size(shape).numel() for shape in SHAPES]
    flat = torch.full((sum(counts),), 9, dtype=dtype)
    views = [piece.view(shape) for piece, shape in zip(flat.split(counts), SHAPES, strict=True)]
    return Gathered(flat, views), flat


@pytest.fixture(params=["library", "without"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without":
        targets.compiled_library.cache_clear()
        monkeypatch.setenv(targets.CHOICE_VARIABLE, "fallback")
        request.addfinalizer(targets.compiled_library.cache_clear)
    return str(request.param)


@pytest.mark.parametrize("make", [values, sliced, of_a_subclass, in_the_middle])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_they_lie_one_after_the_other(
    make: Callable[[tuple[int, ...], torch.dtype], Tensor], dtype: torch.dtype, library: str
) -> None:
    ours, flat = gathered(dtype)
    for _ in range(2):  # the second time into the same memory
        gradients = [make(shape, dtype) for shape in SHAPES]
        assert ours.gather(gradients) is flat
        assert torch.equal(flat, torch.cat([Tensor.flatten(g.as_subclass(Tensor)) for g in gradients]))
        ours.give_back(are_written=False)


@pytest.mark.parametrize("is_told", [False, True])
def test_what_a_step_writes_gets_back(library: str, is_told: bool) -> None:
    ours, flat = gathered(torch.float32)
    gradients = [values(shape, torch.float32) for shape in SHAPES]
    expected = [g * 2 for g in gradients]
    ours.gather(gradients)
    (flat.detach() if not is_told else flat.data).mul_(2)
    ours.give_back(are_written=is_told)
    for got, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(got, wanted)


def test_gradients_are_let_go_and_not_written_to_later(library: str) -> None:
    ours, flat = gathered(torch.float32)
    gradients = [values(shape, torch.float32) for shape in SHAPES]
    before = [g.clone() for g in gradients]
    ours.gather(gradients)
    ours.give_back(are_written=False)
    flat.zero_()
    ours.give_back(are_written=True)
    assert all(torch.equal(got, wanted) for got, wanted in zip(gradients, before, strict=True))


def test_the_library_is_what_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above show nothing of it."""
    ours, flat = gathered(torch.float32)

    def none(*_: object) -> None:
        raise AssertionError("torch's own way")

    monkeypatch.setattr(torch, "_foreach_copy_", none)
    ours.gather([values(shape, torch.float32) for shape in SHAPES])
    assert not flat.eq(9).all()
    with pytest.raises(AssertionError, match="torch's own way"):
        ours.gather([sliced(shape, torch.float32) for shape in SHAPES])
