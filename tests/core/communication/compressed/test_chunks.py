"""Every value is in exactly one chunk, wherever chunks begin."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.compressed.chunks import Chunks


@pytest.mark.parametrize("owners", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("elements", [1, 2, 5, 63, 64, 65, 448, 1000])
def test_values_go_there_and_back(elements: int, owners: int) -> None:
    chunks = Chunks(elements, owners)
    values = torch.arange(1.0, elements + 1)
    filled = torch.full((chunks.filled * chunks.size,), torch.nan)
    chunks.fill_up(values, filled)
    gathered = torch.full((owners, chunks.size), torch.nan)
    for of, rows in chunks.runs(values, filled):
        gathered[of] = rows
    assert torch.equal(gathered.view(-1)[:elements], values)
    assert not gathered.view(-1)[elements:].any(), "the rest is zero"
    regions = [chunks.region(owner) for owner in range(owners)]
    assert torch.equal(torch.cat([values[r] for r in regions]), values)
    for owner, region in enumerate(regions):
        assert torch.equal(gathered[owner, : region.stop - region.start], values[region])
    back = torch.zeros_like(values)
    for of, rows in chunks.runs(back, filled):
        rows.copy_(gathered[of])
    chunks.take_back(filled, back)
    assert torch.equal(back, values)


def test_what_can_be_dealt_evenly_is_never_copied() -> None:
    chunks = Chunks(4096, 4)
    assert (chunks.size, chunks.whole, chunks.filled, chunks.rest) == (1024, 4, 0, 0)
    values = torch.zeros(4096)
    ((owners, rows),) = chunks.runs(values, torch.zeros(0))
    assert owners == slice(0, 4) and rows.data_ptr() == values.data_ptr()
