"""Takes back what a filler's forward and backward do to a module's buffers.

A worker without samples in a micro-batch computes filler samples. Its gradient is replaced by zero; its running
statistics would otherwise stay, and rank 0's reach all workers. Knows nothing of steps: the caller decides which
forwards are a filler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bagua_core.model.module_buffers import ModuleBuffers
from bagua_core.model.overlapping_memory import write
from bagua_core.model.sharded_tensors import copied, local

_Kept = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by name: the buffer, and a copy of its values


class FillerBuffers:
    """buffers: of the module. but_of: layers of this class keep what a forward does to their buffers."""

    def __init__(self, buffers: ModuleBuffers, but_of: type[nn.Module] | None = None) -> None:
        self._buffers = buffers
        self._but_of = but_of
        self._task = -1  # the backward whose end puts buffers back

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within: a forward of the module."""
        kept = self._copies()
        try:
            yield
        finally:
            self._put_back(kept)

    def backward_begins(self) -> None:
        """In a backward through the forward's outputs: checkpointed layers compute their forward in it once more."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            kept = self._copies()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._put_back(kept))

    def _copies(self) -> _Kept:
        named = self._buffers.named(self._but_of)
        return {name: (buffer, copied(buffer)) for name, buffer in named.items()}

    @torch.no_grad()
    def _put_back(self, kept: _Kept) -> None:
        """A buffer that was made, or has another shape, stays: all workers have buffers of the same shapes."""
        live = self._buffers.named(self._but_of)
        for name, (buffer, values) in kept.items():
            now = live.get(name)
            if now is None or now.dtype != values.dtype or local(now).shape != values.shape:
                continue
            if now is not buffer:
                self._buffers.put(name, buffer)
            # without autograd's knowledge: a graph that has the buffer stays usable
            write(local(buffer).data, values)
