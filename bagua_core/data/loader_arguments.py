"""Refuses arguments of a loader that an elastic job cannot have, and names the value and what to give instead."""

from __future__ import annotations

from typing import Any

from bagua_core.data.balancing.balance import Balance
from bagua_core.data.stream_division import is_stream

_REFUSED = {
    "batch_size": "use global_batch_size: the samples of one step over all workers",
    "batch_sampler": "use global_batch_size; the split follows the workers there are",
    "generator": "use seed",
    "in_order": "batches always come in order",
}


def refuse(others: dict[str, Any], dataset: Any) -> None:
    for name, value in others.items():
        if name not in _REFUSED:
            raise TypeError(f"ElasticDataLoader has no argument {name}={value!r}")
        if value is None or (name == "in_order" and value):
            continue
        raise TypeError(f"{name}={value!r} does not go with an elastic job: {_REFUSED[name]}")
    if not is_stream(dataset) and not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has __getitem__ and no __len__: an epoch must have a known length, or be a "
            "stream (torch.utils.data.IterableDataset)"
        )


def require_batch(length: int, global_batch_size: int, drop_last: bool) -> None:
    if length < (global_batch_size if drop_last else 1):
        dropped = " with drop_last=True" if length else ""
        raise ValueError(
            f"a data set of {length} samples has no batch of global_batch_size={global_batch_size}{dropped}"
        )


def require_sizes(global_batch_size: int | None, max_local_batch_size: int | None) -> int:
    """Checks both sizes and returns the global batch size. Raises TypeError, ValueError."""
    if global_batch_size is None:
        raise TypeError("global_batch_size is required: the samples of one step over all workers")
    require_positive("global_batch_size", global_batch_size)
    if max_local_batch_size is not None:
        require_positive("max_local_batch_size", max_local_batch_size)
    return global_batch_size


def require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not an integer")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def refuse_rounds(is_even: bool, max_local_batch_size: int | None) -> None:
    """Checks that the arguments are possible in rounds, and raises ValueError if not.

    is_even: batches divide a data set's order evenly.
    """
    if not is_even:
        raise ValueError(
            "an algorithm whose unit of commit is the round leases places of an epoch's order, which a stream, a "
            'sampler or balance does not have; leave them out, or use the algorithm with unit="step"'
        )
    if max_local_batch_size is not None:
        raise ValueError(
            f"max_local_batch_size={max_local_batch_size} does not go with rounds: every local batch is an "
            'optimizer\'s step of its own; leave it out, or use the algorithm with unit="step"'
        )


def refuse_together(sampler: Any, balance: Any, num_workers: int, persistent_workers: bool) -> None:
    """Checks arguments against each other.

    Raises ValueError for those that exclude each other, and TypeError for a balance of another kind.
    """
    if balance is not None and not isinstance(balance, Balance):
        raise TypeError(
            f"balance={balance!r} is no bagua_core.Balance; pass bagua_core.Balance(complexity_fn=...)"
        )
    if num_workers > 0 and not persistent_workers:
        raise ValueError("persistent_workers=False: loader workers outlive epochs here; leave it out")
    if balance is not None and sampler is not None:
        raise ValueError("balance and sampler both say what a batch consists of; leave one of them out")
