"""Runs torch's operators on one thread in the tests of the core.

torch's threads wait for each other by computing. On these small tensors that cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
