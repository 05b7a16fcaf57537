"""Takes so many descriptors that the next ones have numbers beyond what select.select and small limits allow."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

THOUSAND = 1100


@contextmanager
def thousand_descriptors() -> Iterator[None]:
    """Those that are made from now on have numbers above 1,023. Skips where the host allows too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * THOUSAND:
        pytest.skip(f"this host allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * THOUSAND), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(THOUSAND)]
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
