"""Copies of a whole model in memory that goes back to the system."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch

from bagua_core.elastic.state import copies_apart
from bagua_core.elastic.state.copies_apart import copied_apart
from bagua_core.elastic.state.parameter_watch import FIRST_AUDITS, ParameterWatch

TENSORS = [
    torch.arange(7.0),
    torch.randn(3, 5).t(),
    torch.tensor(2.5, dtype=torch.float64),
    torch.empty(0, 4),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.randn(4, dtype=torch.complex64).conj(),
    torch.randn(2, 1).expand(2, 3),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
]


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """The mappings that are made, each until its memory has gone back."""
    made: list[weakref.ref[mmap.mmap]] = []

    class Noted(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(copies_apart.mmap, "mmap", Noted)
    return made


def test_copies_have_the_values_and_change_with_nothing() -> None:
    tensors = [t.clone() for t in TENSORS]
    copies = copied_apart(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(copy, before) for copy, before in zip(copies, TENSORS, strict=True))
    assert [c.dtype for c in copies] == [t.dtype for t in TENSORS]
    assert [c.stride() for c in copies] == [t.clone().stride() for t in TENSORS], "as of a copy of torch's"
    copies[0].add_(1.0)
    assert torch.equal(copies[1], TENSORS[1])


def test_their_memory_goes_back_with_the_last_of_them(mappings: list[weakref.ref[mmap.mmap]]) -> None:
    copies = copied_apart([torch.ones(100_000), torch.ones(100_000)])
    (mapping,) = mappings
    del copies[0]
    assert mapping() is not None and torch.equal(copies[0], torch.ones(100_000))
    copies.clear()
    assert mapping() is None


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.empty(3, device="meta")]])
def test_there_may_be_nothing_to_map(tensors: list[torch.Tensor]) -> None:
    assert [c.shape for c in copied_apart(tensors)] == [t.shape for t in tensors]


def test_what_is_kept_of_an_audit_keeps_no_copy_of_the_others(mappings: list[weakref.ref[mmap.mmap]]) -> None:
    watch = ParameterWatch()
    model = {"changes": torch.ones(50_000), "stays": torch.ones(50_000)}
    assert FIRST_AUDITS > 0, "the first step has an audit"
    watch.begin(model)
    (mapping,) = mappings
    model["changes"].data.zero_()
    found = watch.changed()
    watch.end()
    before = found["changes"]
    assert before is not None and torch.equal(before, torch.ones(50_000)) and list(found) == ["changes"]
    assert mapping() is None
