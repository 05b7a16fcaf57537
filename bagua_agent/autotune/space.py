"""Lists the settings that a study may try, as points of a grid. Pure.

A point gives each dimension the place of one of its choices. The first choice is what the script says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

Point = tuple[int, ...]
"""By dimension, the place of its choice."""

LEAST_EXPONENT, MOST_EXPONENT = 14, 28  # buckets of 16 KiB to 256 MiB
EXPONENT_STEP = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that bound the space. gradient_bytes: of the model's gradients, 0: unknown. order: measured, in which
    gradients are ready; empty: unknown. crosses: some node has several workers, and there are several nodes.
    algorithms: that the user allowed. pinned: by people."""

    gradient_bytes: int = 0
    order: tuple[int, ...] = ()
    crosses: bool = False
    algorithms: tuple[str, ...] = ()
    pinned: StepSettings = AS_SCRIPTED


@dataclass(frozen=True, slots=True)
class Space:
    """A grid of settings. dimensions: name of a field of StepSettings, and its choices."""

    dimensions: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def size(self) -> int:
        size = 1
        for _, choices in self.dimensions:
            size *= len(choices)
        return size

    def settings_at(self, point: Point) -> StepSettings:
        """Returns the settings of a point. Raises ValueError for a point of another space."""
        if len(point) != len(self.dimensions):
            raise ValueError(f"a point of {len(point)} dimensions is not one of {len(self.dimensions)}")
        fields: dict[str, Any] = {}
        for (name, choices), place in zip(self.dimensions, point, strict=True):
            if not 0 <= place < len(choices):
                raise ValueError(f"{name} has no choice {place}")
            fields[name] = choices[place]
        return StepSettings(**fields)

    def point_of(self, settings: StepSettings) -> Point | None:
        """Returns the point of the settings; None if they are no point of this space: a choice has gone, or people
        pinned it."""
        point = []
        for name, choices in self.dimensions:
            value = getattr(settings, name)
            if value not in choices:
                return None
            point.append(choices.index(value))
        found = tuple(point)
        return found if self.settings_at(found) == settings else None

    def nearest(self, settings: StepSettings) -> StepSettings:
        """Returns what of `settings` this space has: of each other choice the script's, and for an order that was
        measured elsewhere the one that was measured here."""
        fields: dict[str, Any] = {}
        for name, choices in self.dimensions:
            value = getattr(settings, name)
            if name == "order" and value:
                value = choices[-1]
            fields[name] = value if value in choices else choices[0]
        return StepSettings(**fields)

    def first_points(self) -> Iterator[Point]:
        """Yields what every study tries: the script's settings, each other choice of a dimension with few alone, and
        then buckets of a few sizes far apart."""
        origin = (0,) * len(self.dimensions)
        yield origin
        for axis, (name, choices) in sorted(
            enumerate(self.dimensions), key=lambda d: d[1][0] == "bucket_bytes"
        ):
            last = len(choices) - 1
            few = sorted({last, (2 * last) // 3, last // 3} - {0}, reverse=True)
            for place in few if name == "bucket_bytes" else range(1, len(choices)):
                yield (*origin[:axis], place, *origin[axis + 1 :])

    def points(self) -> Iterator[Point]:
        return product(*(range(len(choices)) for _, choices in self.dimensions))


def space_of(facts: Facts) -> Space:
    """Returns the space that the facts allow. Dimensions with one choice are left out."""
    dimensions: list[tuple[str, tuple[Any, ...]]] = []
    if not facts.pinned.bucket_bytes:
        dimensions.append(("bucket_bytes", (0, *_bucket_sizes(facts.gradient_bytes))))
    if facts.crosses and facts.pinned.hierarchical is None:
        dimensions.append(("hierarchical", (None, True, False)))
    if facts.order and not facts.pinned.order and facts.order != tuple(reversed(range(len(facts.order)))):
        dimensions.append(("order", ((), facts.order)))
    if facts.algorithms and not facts.pinned.algorithm:
        dimensions.append(("algorithm", ("", *facts.algorithms)))
    return Space(tuple((name, choices) for name, choices in dimensions if len(choices) > 1))


def _bucket_sizes(gradient_bytes: int) -> tuple[int, ...]:
    """Returns powers of two; larger than the model, one is as good as another."""
    most = MOST_EXPONENT if not gradient_bytes else min(MOST_EXPONENT, (gradient_bytes - 1).bit_length())
    least = min(LEAST_EXPONENT, most) if most >= 10 else 10
    return tuple(1 << exponent for exponent in range(least, max(least, most) + 1, EXPONENT_STEP))


def trials_of(space: Space, rates: Mapping[StepSettings, float]) -> list[tuple[Point, float]]:
    """Returns the points and rates of what was measured in this space."""
    return [
        (point, rate) for settings, rate in rates.items() if (point := space.point_of(settings)) is not None
    ]
