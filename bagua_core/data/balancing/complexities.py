"""How complex is a sample? Asked for when it is needed, and computed once.

Owns what is known so far in this process. How many samples are computed at once, in parallel and from a directory, is
complexity_blocks.py's. Nothing here depends on ranks: every worker finds the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bagua_core.data.balancing.complexity_blocks import KeptBlocks, Measure, all_complexities, checked
from bagua_core.data.balancing.function_identity import UnknownFunction, function_identity


class Complexities:
    """Of the samples of one data set."""

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float] | None,
        *,
        known: Sequence[float] | None = None,
        seed: int = 0,
        workers: int | None = None,
        threads: bool = False,
        cache_dir: str | Path | None = None,
        cache_key: str = "",
    ) -> None:
        """known: of every sample, instead of complexity_fn. threads: for data sets that wait for disks or networks and
        draw no random numbers. Raises ValueError, TypeError."""
        self._length = len(dataset)
        self._workers, self._threads = workers, threads
        self._kept: KeptBlocks | None = None
        self._measure: Measure | None = None
        self._found = np.full(self._length, np.nan)
        self._complete = False
        if known is not None:
            if len(known) != self._length:
                raise ValueError(f"{len(known)} complexities for a data set of {self._length} samples")
            self._found[:] = [checked(value, index) for index, value in enumerate(known)]
            self._complete = True
            return
        if complexity_fn is None:
            raise TypeError("complexity_fn or complexities is required: what a sample costs can't be guessed")
        self._measure = Measure(dataset, complexity_fn, seed)
        if cache_dir is not None:
            name = _cache_name(dataset, complexity_fn, cache_key, seed)
            self._kept = KeptBlocks(Path(cache_dir).expanduser() / name)

    @property
    def is_shared(self) -> bool:
        """Others find on disk what is computed here, so it is computed in whole."""
        return self._kept is not None

    def of(self, indices: Sequence[int]) -> list[float]:
        """Computes those that are not known yet; all of the data set if they are kept on disk."""
        if self._kept is not None:
            self.complete()
        found = self._found[indices]
        if not self._complete and np.isnan(found).any():
            assert self._measure is not None
            missing = [index for index, value in zip(indices, found.tolist(), strict=True) if value != value]
            self._found[missing] = self._measure(missing)
            found = self._found[indices]
        return found.tolist()  # type: ignore[no-any-return]

    def complete(self) -> None:
        """Compute all, in parallel if that pays."""
        if self._complete:
            return
        assert self._measure is not None
        self._found = all_complexities(
            self._measure, self._length, workers=self._workers, threads=self._threads, kept=self._kept
        )
        self._complete = True


def _cache_name(dataset: Any, complexity_fn: Callable[[Any], float], cache_key: str, seed: int) -> str:
    """Raises ValueError if only the user can tell whether kept numbers belong to complexity_fn."""
    try:
        function = function_identity(complexity_fn)
    except UnknownFunction as error:
        if not cache_key:
            raise ValueError(
                f"what complexity_fn does can't be told from it, for {error}; give cache_key, another one "
                "whenever the function or the data change"
            ) from error
        function = getattr(complexity_fn, "__qualname__", type(complexity_fn).__qualname__)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    parts = [kind, str(len(dataset)), function, cache_key, str(seed)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
