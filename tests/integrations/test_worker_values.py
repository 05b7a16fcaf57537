"""Values of workers: a joiner has none in its first step, and those of fillers are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import bagua_core as bagua
from bagua_core.elastic.script_collectives.requests import AllgatherRows
from bagua_core.elastic.state import state_codec
from bagua_core.integrations import worker_values
from bagua_core.integrations.worker_values import gather_objects, gather_unequal, mean

JOINER = None


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """peers(...): the workers before this one, each a tensor and whether it is of fillers, or JOINER. With
    is_joining=True this worker is one too."""

    def act(*others: tuple[torch.Tensor, bool] | None, is_joining: bool = False) -> None:
        shapes: list[list[int]] = []

        def allgather(own: torch.Tensor) -> torch.Tensor:
            rows, is_shape = [], len(shapes) % 2 == 0
            shapes.append([])
            for other in others:
                row = torch.zeros_like(own)
                if other is not None and is_shape:
                    shape = torch.tensor(other[0].shape)
                    row[:] = ~shape if other[1] else shape
                elif other is not None:
                    row[: other[0].numel()] = other[0].flatten()
                rows.append(row)
            return torch.stack([*rows, torch.zeros_like(own) if is_joining else own])

        monkeypatch.setattr(bagua, "allgather", allgather)

    return act


def test_parts_of_joiners_and_fillers_are_left_out(peers: Callable[..., None]) -> None:
    first = torch.arange(6.0).reshape(2, 3)
    peers((first, False), JOINER, (torch.full((9, 3), 7.0), True))
    own = torch.ones(1, 3)
    assert [part.tolist() for part in gather_unequal(own)] == [first.tolist(), own.tolist()]
    assert [part.tolist() for part in gather_unequal(own, is_filler=True)] == [first.tolist()]


def test_a_joiner_gathers_the_others_with_more_rows_of_its_own(peers: Callable[..., None]) -> None:
    first = torch.arange(6.0).reshape(2, 3)
    peers((first, False), is_joining=True)
    assert [part.tolist() for part in gather_unequal(torch.ones(20, 3))] == [first.tolist()]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_both_collectives_are_repeated_if_the_members_change_between_them(
    monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """A worker that the job goes on without counts the members that there are by then: they may be more."""
    counts = iter([before, after, after, after])
    monkeypatch.setattr(bagua, "allgather", lambda own: own.expand(next(counts), *own.shape).clone())
    assert [part.tolist() for part in gather_unequal(torch.ones(1, 2))] == [[[1.0, 1.0]]] * after


def test_numbers_of_joiners_and_fillers_are_left_out(peers: Callable[..., None]) -> None:
    peers((torch.tensor([5.0]), False), JOINER, (torch.tensor([7.0]), True))
    assert gather_unequal(torch.tensor(3.0)) == [torch.tensor(5.0), torch.tensor(3.0)]
    assert gather_unequal(torch.tensor(3.0), is_filler=True) == [torch.tensor(5.0)]


def test_where_all_have_fillers_they_are_gathered(peers: Callable[..., None]) -> None:
    """The mean of nothing is no number, and a script may take the first row."""
    peers((torch.tensor([7.0]), True), JOINER)
    assert gather_unequal(torch.tensor(3.0), is_filler=True) == [torch.tensor(7.0), torch.tensor(3.0)]


def test_without_any_value_a_part_is_empty(peers: Callable[..., None]) -> None:
    peers(JOINER, is_joining=True)
    for own, shape in [(torch.ones(2, 3), (0, 3)), (torch.tensor(1), (0,))]:
        assert [part.shape for part in gather_unequal(own)] == [shape]


@pytest.mark.parametrize(
    ("others", "is_filler", "expected"),
    [
        ([(["a", 1], False)], False, ["a", 1, "own"]),
        ([(["a"], False), (["x"], True)], False, ["a", "own"]),
        ([(["a"], False)], True, ["a"]),
        ([(["x"], True)], True, ["x", "own"]),
        ([([], False)], True, []),
    ],
)
def test_objects_of_fillers_are_left_out_unless_all_are(
    monkeypatch: pytest.MonkeyPatch,
    others: list[tuple[list[object], bool]],
    is_filler: bool,
    expected: list[object],
) -> None:
    def ask(request: AllgatherRows) -> list[torch.Tensor]:
        assert not request.is_filler, "in an evaluation the values count though the step's batch is a filler"
        return [
            torch.cat([*(state_codec.to_bytes([filler, items]) for items, filler in others), request.tensor])
        ]

    monkeypatch.setattr(worker_values, "ask", ask)
    assert gather_objects(["own"], is_filler=is_filler) == expected


def test_a_joiner_alone_gathers_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_values, "ask", lambda request: [request.tensor[:0]])
    assert gather_objects(["own"]) == []


@pytest.mark.parametrize(("is_filler", "expected"), [(False, [2.0, 4.0]), (True, [3.0, 5.0])])
def test_a_mean_is_of_workers_with_samples(
    monkeypatch: pytest.MonkeyPatch, is_filler: bool, expected: list[float]
) -> None:
    monkeypatch.setattr(bagua, "allreduce", lambda own: own + torch.tensor([3.0, 5.0, 1.0]))
    assert mean(torch.tensor([1, 3]), is_filler=is_filler).tolist() == expected


def test_a_mean_without_samples_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bagua, "allreduce", lambda own: own)
    assert mean(torch.tensor(4.0), is_filler=True).item() == 0.0
