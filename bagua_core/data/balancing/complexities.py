"""Computes the complexity of each sample once, when it is needed, and keeps it in a file on request.

Nothing here depends on ranks: every worker finds the same numbers. Each sample is read under a random seed of its own,
so that what it costs does not depend on who reads it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bagua_core.data.partition import mixed_seed
from bagua_core.data.sample_seeding import has_no_randomness, load_seeded_samples, random_sources_kept
from bagua_core.errors import UserError


class StaleComplexities(UserError, ValueError):
    """The kept complexities are not those of this data set and complexity_fn."""


class Complexities:
    """Holds the complexities of the samples of one data set."""

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float] | None,
        *,
        known: Sequence[float] | None = None,
        seed: int = 0,
        cache_dir: str | Path | None = None,
        cache_key: str = "",
    ) -> None:
        """Takes the function that computes a complexity, or all complexities.

        known: of every sample, instead of complexity_fn. cache_key: required with cache_dir.
        Raises ValueError, TypeError.
        """
        self._dataset, self._complexity_fn = dataset, complexity_fn
        self._length = len(dataset)
        self._seed = None if has_no_randomness(dataset) else seed
        self._file: Path | None = None
        self._found = np.full(self._length, np.nan)
        self._complete = False
        if known is not None:
            if len(known) != self._length:
                raise ValueError(f"{len(known)} complexities for a data set of {self._length} samples")
            self._found[:] = [_checked(value, index) for index, value in enumerate(known)]
            self._complete = True
            return
        if complexity_fn is None:
            raise TypeError("complexity_fn or complexities is required: what a sample costs can't be guessed")
        if cache_dir is not None:
            if not cache_key:
                raise ValueError(
                    "cache_dir needs cache_key, a name for complexity_fn and the data: give another one whenever "
                    "either changes"
                )
            name = f"{hashlib.sha256(cache_key.encode()).hexdigest()[:24]}-{self._length}-{seed}.npy"
            self._file = Path(cache_dir).expanduser() / name

    @property
    def is_kept(self) -> bool:
        """Whether all complexities are computed at once and kept in a file, for later processes to read."""
        return self._file is not None

    def of(self, indices: Sequence[int]) -> list[float]:
        """Returns the complexities of these samples. Computes those not known yet; those of the whole data set if they
        are kept in a file."""
        if self._file is not None:
            self.complete()
        found = self._found[indices]
        if not self._complete and np.isnan(found).any():
            missing = [index for index, value in zip(indices, found.tolist(), strict=True) if value != value]
            self._found[missing] = self._computed(missing)
            found = self._found[indices]
        return found.tolist()  # type: ignore[no-any-return]

    def complete(self) -> None:
        """Computes or reads all of them. Raises ValueError, StaleComplexities, and what reading a sample raises."""
        if self._complete:
            return
        if self._file is not None and self._file.exists():
            self._found = self._read(self._file)
        else:
            missing = np.flatnonzero(np.isnan(self._found)).tolist()
            self._found[missing] = self._computed(missing)
            if self._file is not None:
                self._write(self._file)
        self._complete = True

    def _computed(self, indices: Sequence[int]) -> list[float]:
        """Computes the complexities of these samples.

        Raises ValueError, naming the sample, for anything but a finite number of at least 0.
        """
        assert self._complexity_fn is not None
        if self._seed is None:
            return [_checked(self._complexity_fn(self._dataset[index]), index) for index in indices]
        with random_sources_kept():
            return [
                _checked(
                    self._complexity_fn(load_seeded_samples(self._dataset, self._seed, 0, [index])[0]), index
                )
                for index in indices
            ]

    def _read(self, file: Path) -> np.ndarray[Any, Any]:
        try:
            kept = np.load(file)
        except (ValueError, EOFError) as error:
            raise StaleComplexities(f"{file} holds no complexities ({error}): delete it") from error
        if kept.shape != (self._length,) or kept.dtype != np.float64:
            raise StaleComplexities(f"{file} does not hold {self._length} complexities: delete it")
        if self._length:
            index = mixed_seed(self._length, 0) % self._length  # one sample, the same on every machine
            (now,) = self._computed([index])
            if now != kept[index]:
                raise StaleComplexities(
                    f"the complexity of sample {index} is {now:g}, but {kept[index]:g} was kept in {file}: the data or "
                    "complexity_fn have changed. Delete that file, or give another cache_key"
                )
        return kept  # type: ignore[no-any-return]

    def _write(self, file: Path) -> None:
        """Writes the file atomically. Workers that write it at the same time write the same content."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.uname().nodename}.{os.getpid()}.part")
        with part.open("wb") as out:
            np.save(out, self._found)
        part.replace(file)


def _checked(value: Any, index: int) -> float:
    try:
        complexity = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the complexity of sample {index} is {value!r}, which is not a number") from error
    if not math.isfinite(complexity) or complexity < 0:
        raise ValueError(
            f"the complexity of sample {index} is {complexity}; it must be finite and at least 0"
        )
    return complexity
