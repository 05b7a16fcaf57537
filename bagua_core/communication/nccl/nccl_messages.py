"""Carries messages between two ranks over NCCL.

Sends and receives that were begun and not waited for start together, so that two ranks may both receive first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import Pending
from bagua_core.communication.nccl.nccl_line import Launch, NcclLine


class NcclMessages:
    """The sends and receives that were begun and not waited for. They start together, so that two ranks may both
    receive first. Those of equal tags find each other because each batch is started in the order of tags."""

    def __init__(self, line: NcclLine) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._batch: list[NcclMessage] = []

    def add(self, peer: int, tag: int, tensor: torch.Tensor, is_send: bool) -> Pending:
        message = NcclMessage(self, peer, tag, tensor, is_send)
        with self._lock:
            self._batch.append(message)
        return message

    def start(self) -> None:
        with self._lock:
            batch, self._batch = sorted(self._batch, key=lambda m: (m.peer, m.tag)), []
            if not batch:
                return
            started = self._line.start("messages", self._launch(batch), [m.tensor for m in batch])
            for message in batch:
                message.started = started

    def _launch(self, batch: Sequence[NcclMessage]) -> Launch:
        return move_bytes(self._line, [(m.peer, as_bytes(m.tensor), m.is_send) for m in batch])


class NcclMessage(Pending):
    def __init__(
        self, messages: NcclMessages, peer: int, tag: int, tensor: torch.Tensor, is_send: bool
    ) -> None:
        self._messages = messages
        self.peer = peer
        self.tag = tag
        self.tensor = tensor
        self.is_send = is_send
        self.started: Pending | None = None

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._under_way().wait(stalled, stall_after_s)

    def follow(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._under_way().follow(stalled, stall_after_s)

    def check(self) -> None:
        if self.started is not None:
            self.started.check()

    def is_done(self) -> bool:
        return self._under_way().is_done()

    def is_known_done(self) -> bool:
        return self.started is not None and self.started.is_known_done()

    def _under_way(self) -> Pending:
        if self.started is None:
            self._messages.start()
        assert self.started is not None
        return self.started


def move_bytes(line: NcclLine, moves: Sequence[tuple[int, torch.Tensor, bool]]) -> Launch:
    """Sends and receives several messages that belong together. moves: (peer, bytes, whether to send). Empty ones are
    left out, and so they are at the other end."""
    filled = [move for move in moves if move[1].numel()]
    if not filled:
        return
    kind = line.nccl.type_of(torch.uint8)

    def act() -> None:
        for peer, data, is_send in filled:
            move = line.handle.send if is_send else line.handle.recv
            move(data.data_ptr(), data.numel(), kind, peer, line.stream.address)

    yield from line.call(lambda: line.nccl.grouped(act))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as bytes: moving data must not depend on which types NCCL can add."""
    return tensor.reshape(-1).view(torch.uint8)
