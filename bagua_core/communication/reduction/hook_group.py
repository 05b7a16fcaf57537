"""Lends the job's communicator to communication hooks written for torch's DistributedDataParallel.

A hook calls torch.distributed's collectives on a process group, also in callbacks of futures. `HookGroup` is such a
group. Its futures are completed by `settle` in the operation queue's thread, one after the other, so that all ranks
start a hook's collectives in one order, whatever their times. A future that the hook waits for is completed at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.communication.pending import DonePending
from bagua_core.errors import UserError

_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.SUM,  # and then divided
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.MIN: ReduceOp.MIN,
}


class HookError(UserError, RuntimeError):
    """A communication hook did what it can't do here, or returned what is no gradient."""


class _DrivenFuture(torch.futures.Future[Any]):
    """A future that is completed by the thread that waits for it; no other thread could complete it."""

    def __init__(self, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._devices = devices

    @abstractmethod
    def _drive(self) -> None:
        """Completes the future. Raises what its collective raises."""

    def wait(self) -> Any:
        if not self.done():
            self._drive()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        return _ThenFuture(self, callback, self._devices)


class _ThenFuture(_DrivenFuture):
    """The result of a callback on another future."""

    def __init__(
        self, before: _DrivenFuture, callback: Callable[[Any], Any], devices: list[int | str | torch.device]
    ) -> None:
        super().__init__(devices)
        self._before, self._callback = before, callback
        before.add_done_callback(self._call)

    def _call(self, before: Any) -> None:
        try:
            self.set_result(self._callback(before))
        except Exception as error:  # noqa: BLE001  the hook's; raised where the value is asked for
            self.set_exception(error)

    def _drive(self) -> None:
        try:
            self._before.wait()
        except Exception:
            if not self.done():  # else the callback has made something of it
                raise


class HookFuture(_DrivenFuture):
    """The result of a collective: a list of tensors, as torch's process groups give it."""

    def __init__(self, group: HookGroup, pending: Pending, tensors: list[torch.Tensor], divisor: int) -> None:
        super().__init__([t.device for t in tensors if t.device.type != "cpu"])
        self._group, self.pending, self._tensors, self._divisor = group, pending, tensors, divisor

    def complete(self) -> None:
        """Sets the result, once the collective is done, and runs the hook's callbacks."""
        if self.done():
            return
        if self._divisor > 1:
            for tensor in self._tensors:
                tensor.div_(self._divisor)
        with torch.no_grad():
            self.set_result(self._tensors)

    def _drive(self) -> None:
        try:
            self.pending.wait()
        except Exception as error:
            self._group.failure = self._group.failure or error
            raise
        self.complete()


class _Work:
    """The part of torch's Work that a hook uses."""

    def __init__(self, future: HookFuture) -> None:
        self._future = future

    def get_future(self) -> HookFuture:
        return self._future

    def wait(self, timeout: object = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())


class HookGroup(dist.ProcessGroup):
    """A process group whose collectives run on the job's communicator. communicator None: a world of one. failure: the
    first error of a collective that a callback waited for."""

    def __init__(self, communicator: Communicator | None) -> None:
        rank, size = (0, 1) if communicator is None else (communicator.global_rank, communicator.world_size)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._communicator = communicator
        self._open: deque[HookFuture] = deque()
        self.failure: Exception | None = None

    def _begun(self, pending: Pending, tensors: list[torch.Tensor], divisor: int = 1) -> _Work:
        future = HookFuture(self, pending, tensors, divisor)
        self._open.append(future)
        return _Work(future)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:  # type: ignore[override]
        (tensor,) = tensors
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        op = next((ours for theirs, ours in _OPS.items() if asked == theirs), None)
        if op is None:
            raise HookError(
                f"all_reduce with {asked} is not possible in a hook; use SUM, AVG, PRODUCT, MAX or MIN"
            )
        divisor = self.size() if asked == dist.ReduceOp.AVG else 1
        if self._communicator is None or tensor.numel() == 0:
            return self._begun(DonePending(), tensors, divisor)
        return self._begun(self._communicator.allreduce(tensor, op), tensors, divisor)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:  # type: ignore[override]
        (tensor,) = tensors
        if self._communicator is None or tensor.numel() == 0:
            return self._begun(DonePending(), tensors)
        return self._begun(self._communicator.broadcast(tensor, opts.rootRank), tensors)

    def settle(self, result: torch._C.Future[Any] | None) -> Generator[Pending, None, None]:
        """Yields what the hook's collectives wait for, completing each, until all are done. Raises HookError if
        `result` still has no value then."""
        while self._open:
            future = self._open.popleft()
            if not future.done():
                yield future.pending
                future.complete()
        if result is not None and not result.done():
            raise HookError("the future that the hook returned has no value once its collectives are done")
