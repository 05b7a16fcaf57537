"""Provides the host's waits for a device: reports of a stall, one wait for many operations, and a value that arrives
with it.

A step needs one wait of the host for the device: for the operation that comes last, whose end says that the earlier
ones have ended. What decides the step (the switch pair) is copied to the host behind it, and that copy is what the host
waits for. Everything before is only put in order on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import Pending
from bagua_core.communication.devices import device_order


class StallReports:
    """Calls stalled(waited_s) from `look` each time another stall_after_s has passed."""

    def __init__(self, stalled: Callable[[float], None] | None, stall_after_s: float) -> None:
        self._stalled = stalled
        self._stall_after_s = stall_after_s
        self._began_s = self._told_s = time.monotonic()

    def look(self) -> None:
        now_s = time.monotonic()
        if self._stalled is not None and now_s - self._told_s >= self._stall_after_s:
            self._told_s = now_s
            self._stalled(now_s - self._began_s)


class Followed(Pending):
    """An operation for a caller that only needs its place in the order of the device: `wait` is `pending.follow`."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._pending.follow(stalled, stall_after_s)

    def is_done(self) -> bool:
        return self._pending.is_done()

    def check(self) -> None:
        self._pending.check()


def last_awaited(pendings: Sequence[Pending], tensors: Sequence[torch.Tensor]) -> list[Pending]:
    """Returns operations for a caller that waits for each of them, so that the host waits for the device at the last
    one only.

    pendings: operations on `tensors` that one communicator began in this order. Tensors of several devices have no
    order between them.
    """
    if len({tensor.device for tensor in tensors}) > 1:
        return list(pendings)
    return [*map(Followed, pendings[:-1]), *pendings[-1:]]


class OnHost(Pending):
    """The arrival of `value` on the host, behind `last`, the operation that makes it. The host waits once for both."""

    def __init__(self, value: torch.Tensor, last: Pending) -> None:
        self._value = value
        self._last = last
        self.host: torch.Tensor | None = None
        """Set once `wait` has returned."""

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        order = device_order.order_of([self._value])
        if order is device_order.HOST:
            self._last.wait(stalled, stall_after_s)
            self.host = self._value
            return
        reports = StallReports(stalled, stall_after_s)
        self._last.follow(stalled, stall_after_s)
        host = order.copy_to_host(self._value)

        def look() -> None:
            self._last.check()
            reports.look()

        order.now().wait(look)
        self.host = host

    def is_done(self) -> bool:
        return self._last.is_done()

    def check(self) -> None:
        self._last.check()


def wait_once(
    pendings: Sequence[Pending],
    wait: Callable[[Pending], None],
    value: torch.Tensor | None = None,
    devices: Sequence[torch.device] | None = None,
) -> torch.Tensor | None:
    """Waits for operations that were started in this order on one communicator, with one wait of the host a device.

    wait: see StepReductions.wait. value: what the last operation makes; returned as a tensor of the host. devices: of
    each operation; None: one for all. Raises CollectiveFailed if any of them failed.
    """
    if not pendings:
        return value
    arrived = None if value is None else OnHost(value, pendings[-1])
    if len(pendings) > 1:
        last_of = {device: place for place, device in enumerate(devices or [None] * len(pendings))}
        for place, pending in enumerate(pendings[:-1]):
            wait(pending if place in last_of.values() else Followed(pending))
    wait(pendings[-1] if arrived is None else arrived)
    return None if arrived is None else arrived.host
