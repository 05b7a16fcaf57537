"""Computes by how much compression reduces what a worker sends. The only definition, for the page and the metrics."""

from __future__ import annotations

from bagua_contract import session_pb2


def compression_of(progress: session_pb2.Progress) -> float | None:
    """Returns the bytes of gradients of a worker's committed steps for each byte that it sent; None before both are
    known."""
    gradients = progress.gradient_bytes * sum(progress.step_counts)
    return gradients / progress.sent_bytes if gradients and progress.sent_bytes else None
