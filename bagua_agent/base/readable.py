"""Waits until one of some descriptors can be read, whatever its number: select.select refuses those above 1,023."""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    def fileno(self) -> int: ...


S = TypeVar("S", bound="int | HasFileno")


def readable(sources: Iterable[S], timeout_s: float | None = None) -> list[S]:
    """Returns the sources that can be read or have ended, as soon as there are any; none after timeout_s."""
    by_descriptor = {source if isinstance(source, int) else source.fileno(): source for source in sources}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    ready = poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))
    return [by_descriptor[descriptor] for descriptor, _ in ready]
