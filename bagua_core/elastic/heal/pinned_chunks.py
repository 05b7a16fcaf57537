"""Moves parts of a copied state between a device and the network through host memory: pinned memory for CUDA.

A chunk is read and written by the host, so both ways wait for the device, once for each chunk.
"""

from __future__ import annotations

import torch

from bagua_core.communication.devices import device_order
from bagua_core.communication.devices.device_order import DeviceOrder
from bagua_core.elastic.state.flat_tensors import FlatTensors


def room(tensors: FlatTensors, begin: int, end: int) -> torch.Tensor:
    """Returns host memory (uint8) for the bytes from `begin` to `end`."""
    order = device_order.order_of(piece for _, piece in tensors.pieces(begin, end))
    return order.room_on_host(torch.empty(end - begin, dtype=torch.uint8, device="cpu"))


def read(tensors: FlatTensors, begin: int, end: int) -> torch.Tensor:
    """Reads the bytes from `begin` to `end` into host memory; padding reads as zero."""
    chunk = room(tensors, begin, end)
    orders: dict[DeviceOrder, None] = {}
    covered = 0
    for at, piece in tensors.pieces(begin, end):
        chunk[covered:at].zero_()
        covered = at + piece.numel()
        order = device_order.order_of([piece])
        order.copy_into_host(piece, chunk[at:covered])
        orders[order] = None
    chunk[covered:].zero_()
    _wait(orders)
    return chunk


def write(tensors: FlatTensors, begin: int, chunk: torch.Tensor) -> None:
    """Puts `chunk` into the tensors' memory from byte `begin` on. Nothing is written after the call."""
    orders: dict[DeviceOrder, None] = {}
    for at, piece in tensors.pieces(begin, begin + chunk.numel()):
        order = device_order.order_of([piece])
        order.copy_from_host(chunk[at : at + piece.numel()], piece)
        orders[order] = None
    _wait(orders)


def _wait(orders: dict[DeviceOrder, None]) -> None:
    for order in orders:
        order.now().wait(lambda: None)
