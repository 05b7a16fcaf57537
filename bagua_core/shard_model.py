"""Checks what a wrapped model does in a deterministic job, and refuses what would depend on the number of workers."""

from __future__ import annotations

import sys

from torch import nn

from bagua_core.algorithms import Algorithm
from bagua_core.errors import NotDeterministicError
from bagua_core.model.shard_buffers import ShardBuffers


class ModelOfShards:
    """Checks one wrapped model of a deterministic job. Raises NotDeterministicError for an algorithm or a layer that
    has no fixed order."""

    def __init__(self, module: nn.Module, algorithm: Algorithm) -> None:
        if not algorithm.has_fixed_order:
            raise NotDeterministicError(
                f"algorithm {algorithm.described!r} does not sum gradients in an order that is independent "
                "of the number "
                'of workers; a deterministic job needs algorithm="gradient_allreduce" with average=True'
            )
        compiled = next((name for name, part in module.named_modules() if _is_compiled(part)), None)
        if compiled is not None:
            print(
                f"bagua: {compiled or 'the model'} is compiled; in a deterministic job it runs eagerly, since compiled "
                "code depends on the shapes that a process has seen",
                file=sys.stderr,
                flush=True,
            )
        self.buffers = ShardBuffers(module)

    @staticmethod
    def refuse_no_sync() -> None:
        raise NotDeterministicError(
            "no_sync() adds gradients of several batches of the loader, which are shards in a deterministic job; leave "
            "it out, and give the loader a larger global_batch_size"
        )


def _is_compiled(module: nn.Module) -> bool:
    """Tells whether torch.compile was applied to the module, as a function or by `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
