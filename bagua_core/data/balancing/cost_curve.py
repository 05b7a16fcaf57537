"""How long does a sample take, by its complexity? A rising line of a few pieces, fitted to measured steps.

A step of one worker lasts about `per_step + sum of f(complexity)` over its samples. f is `per_sample` at 0 and rises
with a slope of its own between any two knots; no slope is negative. Sums over rows (`Sums`) are all that a fit needs,
so workers add theirs up. Pure Python arithmetic in a fixed order: equal sums give equal curves on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PIECES = 6
_SWEEPS = 400
_CHANGE = 1e-10  # relative: a sweep that changes less ends the fit
# What is assumed before anything is measured, each worth so many rows:
_TRUST_IN_PROPORTION = 0.5  # time grows with complexity
_SMOOTHNESS = 30.0  # neighbouring slopes differ little


@dataclass(frozen=True, slots=True)
class CostCurve:
    """knots: ascending complexities, one less than slopes; the last slope goes on for ever. Seconds."""

    knots: tuple[float, ...]
    per_step: float
    per_sample: float
    slopes: tuple[float, ...]

    def step_s(self, complexities: Sequence[float]) -> float:
        """What a step with these samples takes."""
        total = self.per_step
        for complexity in complexities:
            total += self.cost(complexity)
        return total

    def cost(self, complexity: float) -> float:
        total = self.per_sample
        for piece, slope in zip(pieces_of(complexity, self.knots), self.slopes, strict=True):
            total += piece * slope
        return total

    def differs(self, other: CostCurve | None, by: float) -> bool:
        """Whether costs at the knots, as parts of their sum, differ by more than `by` of the largest."""
        # without a curve the complexity is the cost
        mine = _parts([self.cost(knot) for knot in self.knots])
        theirs = _parts([other.cost(knot) if other else knot for knot in self.knots])
        return any(abs(m - t) > by * max(*mine, *theirs) for m, t in zip(mine, theirs, strict=True))


def _parts(values: Sequence[float]) -> list[float]:
    total = 0.0
    for value in values:
        total += value
    return [value / total if total else 0.0 for value in values]


def knots_of(complexities: Sequence[float], pieces: int = PIECES) -> tuple[float, ...]:
    """Complexities at which pieces end: each piece holds an equal part of all complexity, so a heavy tail, where the
    time goes, is not one piece. Fewer, or one, where there is little to tell apart."""
    ranked = sorted(complexities)
    total = 0.0
    for value in ranked:
        total += value
    knots: list[float] = []
    reached = 0.0
    for value in ranked:
        reached += value
        if value > 0 and reached >= total * (len(knots) + 1) / pieces and (not knots or value > knots[-1]):
            knots.append(value)
            if len(knots) == pieces - 1:
                break
    return tuple(knots) or (1.0,)


def pieces_of(complexity: float, knots: tuple[float, ...]) -> list[float]:
    """How much of `complexity` lies in each piece."""
    parts = []
    low = 0.0
    for knot in knots:
        parts.append(min(max(complexity - low, 0.0), knot - low))
        low = knot
    parts.append(max(complexity - low, 0.0))
    return parts


@dataclass(frozen=True, slots=True)
class Sums:
    """What rows add up to, flat: rows, seconds, products of columns (upper triangle), columns times seconds. A row's
    columns are 1, its samples, and its complexity in each piece."""

    values: tuple[float, ...]

    @staticmethod
    def length(knots: tuple[float, ...]) -> int:
        columns = len(knots) + 3
        return 2 + columns * (columns + 1) // 2 + columns

    @staticmethod
    def zero(knots: tuple[float, ...]) -> Sums:
        return Sums((0.0,) * Sums.length(knots))

    @staticmethod
    def of_row(complexities: Sequence[float], seconds: float, knots: tuple[float, ...]) -> Sums:
        columns = [1.0, float(len(complexities))] + [0.0] * (len(knots) + 1)
        for complexity in complexities:
            for number, piece in enumerate(pieces_of(complexity, knots)):
                columns[number + 2] += piece
        products = [a * b for i, a in enumerate(columns) for b in columns[i:]]
        return Sums((1.0, seconds, *products, *(c * seconds for c in columns)))

    def plus(self, other: Sums, keeping: float = 1.0) -> Sums:
        """keeping: how much of these still counts."""
        return Sums(tuple(keeping * a + b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def rows(self) -> float:
        return self.values[0]


def fitted(sums: Sums, knots: tuple[float, ...]) -> CostCurve | None:
    """The curve that fits the rows best; None while they are too few, or took no time.

    Least squares without negative coefficients, by coordinates, drawn slightly towards time proportional to
    complexity.
    """
    columns = len(knots) + 3
    if sums.rows < 2 * columns or sums.values[1] <= 0.0:
        return None
    products = [[0.0] * columns for _ in range(columns)]
    at = 2
    for i in range(columns):
        for j in range(i, columns):
            products[i][j] = products[j][i] = sums.values[at]
            at += 1
    by_seconds = list(sums.values[at:])
    total = 0.0
    for j in range(2, columns):
        total += products[0][j]
    if total <= 0.0:
        return None
    usual = [0.0, 0.0] + [sums.values[1] / total] * (columns - 2)
    found = list(usual)
    smooth = 0.0
    for j in range(2, columns):
        smooth += _SMOOTHNESS / sums.rows * products[j][j] / (columns - 2)
    for _ in range(_SWEEPS):
        changed = 0.0
        for j in range(columns):
            weight = products[j][j]
            if weight <= 0.0:
                continue
            rest = by_seconds[j]
            for i in range(columns):
                if i != j:
                    rest -= products[j][i] * found[i]
            drawn = _TRUST_IN_PROPORTION / sums.rows * weight
            rest += drawn * usual[j]
            weight += drawn
            for i in (j - 1, j + 1):
                if j >= 2 and 2 <= i < columns:
                    rest += smooth * found[i]
                    weight += smooth
            better = max(0.0, rest / weight)
            changed = max(changed, abs(better - found[j]) * products[0][j])
            found[j] = better
        if changed <= _CHANGE * sums.values[1]:
            break
    if not any(found[1:]):
        return None
    return CostCurve(knots, found[0], found[1], tuple(found[2:]))
