"""Waits a bounded time for the first message of a call, so that a client that sends none keeps no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar

import grpc

M = TypeVar("M")


def first_of(messages: Iterator[M], context: grpc.ServicerContext, within_s: float) -> M | None:
    """Returns the first message; None if the stream ends without one. A stream that sends none for within_s is
    cancelled, which gRPC raises here."""
    limit = threading.Timer(within_s, context.cancel)
    limit.daemon = True
    limit.start()
    try:
        return next(messages, None)
    finally:
        limit.cancel()
