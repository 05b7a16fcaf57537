"""Detects samples that draw random numbers while they load: the cache would freeze their augmentation.

Looks at the states of Python's, numpy's and torch's CPU generator, for the first few samples of a process only.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_LOOKED_AT = 4


class RandomDraws:
    def __init__(self) -> None:
        self._left = _LOOKED_AT

    @contextmanager
    def watched(self, found: list[str]) -> Iterator[None]:
        """Adds to `found` the names of the generators that were drawn from within; for the first few samples only."""
        if self._left <= 0:
            yield
            return
        self._left -= 1
        before = _states()
        yield
        found += [name for name, state in _states().items() if state != before[name]]


def _states() -> dict[str, object]:
    numpy = np.random.get_state(legacy=False)
    return {
        "random": random.getstate(),
        "numpy.random": pickle.dumps(numpy),
        "torch": bytes(torch.default_generator.get_state().numpy()),
    }
