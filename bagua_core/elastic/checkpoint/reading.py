"""Reads several parts at the same time: a store answers some requests in the time of one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

READERS = 8

T = TypeVar("T")


def read_each(read: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """Returns what `read` returns for each name, in their order.

    Raises the first error, when the reads under way have ended. The threads do not keep the process, as those of
    concurrent.futures do: a disk may hang.
    """
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(names)):
        left.put(number)
    found: dict[int, T] = {}
    errors: list[Exception] = []

    def work() -> None:
        while not errors:
            try:
                number = left.get_nowait()
            except queue.Empty:
                return
            try:
                found[number] = read(names[number])
            except Exception as error:  # noqa: BLE001 (raised below, in the caller's thread)
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="bagua-checkpoint-reader", daemon=True)
        for _ in range(min(READERS, len(names)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(names))]
