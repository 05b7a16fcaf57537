"""Returns what the launcher passed to this process, by the original's function names."""

from __future__ import annotations

import os

from bagua_contract.environment import default_bucket_size_in
from bagua_core.communication.reduction.buckets import DEFAULT_BUCKET_CAP_MB
from bagua_core.torch_api.communication import get_local_rank, get_local_size, get_rank, get_world_size

__all__ = ["get_default_bucket_size", "get_local_rank", "get_local_size", "get_rank", "get_world_size"]


def get_default_bucket_size() -> int:
    """Returns the bytes of a bucket of gradients, from BAGUA_DEFAULT_BUCKET_SIZE, which --default_bucket_size sets."""
    given = default_bucket_size_in(os.environ)
    return DEFAULT_BUCKET_CAP_MB * 1024 * 1024 if given is None else given
