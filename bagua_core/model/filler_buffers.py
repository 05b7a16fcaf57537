"""Takes back what a filler's forward and backward do to a module's buffers.

A worker without samples in a micro-batch computes filler samples. Its gradient is replaced by zero; its running
statistics would otherwise stay, and rank 0's reach all workers. Integers outside normalizations stay: they count
forwards or point into a queue, alike on all workers. A forward in which the script has the answer of other
workers' collectives may write that into buffers, as all workers do (a queue of features): it stays, and only the
statistics of torch's own normalizations are taken back. Knows nothing of steps: the caller decides which forwards are a
filler's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bagua_core.model.module_buffers import ModuleBuffers
from bagua_core.model.overlapping_memory import write
from bagua_core.model.sharded_tensors import copied, local

_Copies = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by name: the buffer, and a copy of its values
_Kept = tuple[int, _Copies]  # collectives answered before


class FillerBuffers:
    """Takes back what a filler's forward and backward do to the buffers of one module.

    buffers: of the module. answered: how many of the script's collectives other workers have answered so far. but_of:
    layers of this class keep what a forward does to their buffers.
    """

    def __init__(
        self, buffers: ModuleBuffers, answered: Callable[[], int], but_of: type[nn.Module] | None = None
    ) -> None:
        self._buffers = buffers
        self._answered = answered
        self._but_of = but_of
        self._task = -1  # the backward whose end puts buffers back

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Saves the buffers and puts them back at the end of the context, in which a forward of the module runs."""
        kept = self._copies()
        try:
            yield
        finally:
            self._put_back(kept)

    def backward_begins(self) -> None:
        """Saves the buffers until the end of the backward under way, for checkpointed layers compute their forward in
        it once more. Called in a backward through the forward's outputs."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            kept = self._copies()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._put_back(kept))

    def _copies(self) -> _Kept:
        of_normalizations = self._buffers.names_of_normalizations()
        named = {
            name: buffer
            for name, buffer in self._buffers.named(self._but_of).items()
            if buffer.is_floating_point() or buffer.is_complex() or name in of_normalizations
        }
        return self._answered(), {name: (buffer, copied(buffer)) for name, buffer in named.items()}

    @torch.no_grad()
    def _put_back(self, kept: _Kept) -> None:
        """Writes the saved values back. A buffer that was made, or has another shape, stays: all workers have buffers
        of the same shapes."""
        answered_before, copies = kept
        is_answered = self._answered() != answered_before
        live = self._buffers.named_of_own_samples() if is_answered else self._buffers.named(self._but_of)
        for name, (buffer, values) in copies.items():
            now = live.get(name)
            if now is None or now.dtype != values.dtype or local(now).shape != values.shape:
                continue
            if now is not buffer:
                self._buffers.put(name, buffer)
            # without autograd's knowledge: a graph that has the buffer stays usable
            write(local(buffer).data, values)
