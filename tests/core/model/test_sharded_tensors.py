"""Layouts of sharded tensors, on a mesh that counts what it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_core.model.sharded_tensors import Layout, UnsavablePlacement


class Mesh:
    """Two workers, of which this is the second."""

    shape, mesh_dim_names = (2,), ("shard",)

    def __init__(self) -> None:
        self.asked = 0

    def get_coordinate(self) -> tuple[int]:
        return (1,)

    @property
    def mesh(self) -> torch.Tensor:
        """torch makes it anew for each caller."""
        self.asked += 1
        return torch.tensor([0, 1])


def sharded(mesh: Mesh, rows: int, local_rows: int, placement: str = "S(0)") -> Any:
    tensor, local = torch.empty(rows, 3, device="meta"), torch.empty(local_rows, 3, device="meta")
    return SimpleNamespace(
        device_mesh=mesh,
        placements=(placement,),
        shape=tensor.shape,
        stride=tensor.stride,
        _local_tensor=local,
    )


def test_equal_layouts_are_worked_out_once() -> None:
    mesh = Mesh()
    first, again = (Layout.of(sharded(mesh, 5, 2)) for _ in range(2))
    assert first == again and mesh.asked == 1
    assert (first.offset, first.ranks, first.shape) == ((3, 0), (0, 1), (5, 3))
    assert Layout.of(sharded(mesh, 4, 2)).offset == (2, 0) and mesh.asked == 2
    other = Mesh()
    assert Layout.of(sharded(other, 5, 2)) == first and other.asked == 1


@pytest.mark.parametrize(("local_rows", "placement"), [(3, "S(0)"), (2, "P(sum)")])
def test_a_refusal_is_no_layout_of_another_tensor(local_rows: int, placement: str) -> None:
    mesh = Mesh()
    Layout.of(sharded(mesh, 5, 2))
    for _ in range(2):
        with pytest.raises(UnsavablePlacement):
            Layout.of(sharded(mesh, 5, local_rows, placement))
