"""Defines and checks the `balance` argument of ElasticDataLoader."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Balance:
    """Splits every global batch so that all workers take the same time.

    complexity_fn: of a sample, a number of at least 0 (its length, say), or `complexities`: of every sample, by
      index. They must be the same on every worker; where samples are augmented at random, complexity_fn sees a version
      that follows from the loader's seed.
    budget: the most complexity in a global batch (tokens in a step); global_batch_size then only bounds its samples. A
      sample beyond the budget has a batch of its own.
    similar_batches: samples are sorted by complexity within runs of so many global batches, so that the largest
      are in one batch and can be dealt out evenly. 1, the default, leaves the batches as they are without balancing.
    mean_over: what the script's loss is a mean over, "samples" of its batch or "complexity" (tokens, say): workers'
      gradients are weighted by it.
    cache_dir: keep complexities there, shared by all processes that see it. cache_key: required with it; names
      complexity_fn and the data, so give another one whenever either changes.

    Raises ValueError, TypeError.
    """

    complexity_fn: Callable[[Any], float] | None = None
    complexities: Sequence[float] | None = None
    budget: float | None = None
    similar_batches: int = 1
    mean_over: Literal["samples", "complexity"] = "samples"
    cache_dir: str | Path | None = None
    cache_key: str = ""

    def __post_init__(self) -> None:
        if (self.complexity_fn is None) == (self.complexities is None):
            raise TypeError("Balance takes complexity_fn or complexities: one of them, not both")
        if self.complexity_fn is not None and not callable(self.complexity_fn):
            raise TypeError(f"complexity_fn={self.complexity_fn!r} can't be called with a sample")
        if self.budget is not None and not (math.isfinite(self.budget) and self.budget > 0):
            raise ValueError(f"budget={self.budget} must be finite and above 0")
        if isinstance(self.similar_batches, bool) or not isinstance(self.similar_batches, int):
            raise TypeError(f"similar_batches={self.similar_batches!r} is not an integer")
        if self.similar_batches < 1:
            raise ValueError(f"similar_batches={self.similar_batches} must be at least 1")
        if self.mean_over not in ("samples", "complexity"):
            raise ValueError(f"mean_over={self.mean_over!r} is neither 'samples' nor 'complexity'")
