"""Keeps what forwards of single shards do to a module's buffers, so that it can be applied in shard order.

A BatchNorm layer in training writes the statistics of its shard to scratch memory, from which `apply_statistics` makes
the running ones. Other buffers begin each shard with the values of the step's begin. Parameters that the script changes
between two shards are refused. Knows nothing of ranks and messages. Invariant: between the forwards of a step all
buffers are those of its begin, until they are applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bagua_core.errors import NotDeterministicError
from bagua_core.model.module_buffers import ModuleBuffers
from bagua_core.model.sharded_tensors import version

LARGE_BYTES = 1 << 16
AUDITED_STEPS, AUDIT_EVERY = 4, 64
_SWAPPED = ("running_mean", "running_var", "num_batches_tracked")


class Shard(Protocol):
    """A micro-batch of a deterministic job."""

    @property
    def shard(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """A buffer with its values at the step's begin. version: of the buffer, by which a change shows."""

    buffer: torch.Tensor
    version: int
    values: torch.Tensor
    address: int
    integers: tuple[torch.Tensor, torch.Tensor] | None
    """Views of a contiguous buffer and of the values: to make them costs more than to compare them."""

    @classmethod
    def of(cls, buffer: torch.Tensor, values: torch.Tensor) -> _Kept:
        views = (_as_integers(buffer), _as_integers(values)) if buffer.is_contiguous() else None
        return cls(buffer, buffer._version, values, buffer.data_ptr(), views)


class _Layer:
    """A BatchNorm layer with running statistics."""

    def __init__(self, name: str, module: _BatchNorm, buffers: ShardBuffers) -> None:
        self.name = name
        self.module = module
        self._buffers = buffers
        self._own: dict[str, Any] | None = None
        self.found: list[torch.Tensor] = []  # mean and variance of the shard under way
        self.hooks = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        ]

    @property
    def width(self) -> int:
        return int(self.module.num_features)

    @property
    def is_updating(self) -> bool:
        """Whether a forward changes its running statistics."""
        module = self.module
        return module.training and module.track_running_stats and module.running_mean is not None

    def _before(self, module: nn.Module, args: Any) -> None:
        if not self.is_updating or self._own is not None or not self._buffers.is_in_step:
            return
        if not self._buffers.is_computing:
            raise NotDeterministicError(
                f"{self.name} computed outside its shard's forward (activation checkpointing, or a forward in training "
                "mode beside it); a deterministic job applies one mean and variance a shard. Keep the layer out of the "
                "checkpointed part, and call eval() for other forwards"
            )
        own = {name: module._buffers[name] for name in _SWAPPED}
        self._own = {**own, "momentum": self.module.momentum}
        # with a momentum of 1 the layer writes the statistics themselves
        module._buffers["running_mean"] = torch.zeros_like(self.module.running_mean)  # type: ignore[arg-type]
        module._buffers["running_var"] = torch.zeros_like(self.module.running_var)  # type: ignore[arg-type]
        module._buffers["num_batches_tracked"] = None
        self.module.momentum = 1.0

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        own, self._own = self._own, None
        if own is None:
            return
        written = [module._buffers["running_mean"], module._buffers["running_var"]]
        self.module.momentum = own.pop("momentum")
        module._buffers.update(own)
        if self.found:
            raise NotDeterministicError(
                f"{self.name} computed twice in one shard (a layer that is used twice, or activation checkpointing); a "
                "deterministic job applies one mean and variance a shard. Give each place a layer of its own, or keep "
                "the layer out of the checkpointed part"
            )
        self.found = [tensor for tensor in written if tensor is not None]

    def apply(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Applies one shard's statistics to the running ones, as the layer itself does it."""
        module = self.module
        factor = module.momentum
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(module.num_batches_tracked)
        assert factor is not None and module.running_mean is not None and module.running_var is not None
        for running, found in ((module.running_mean, mean), (module.running_var, variance)):
            running.mul_(1.0 - factor).add_(found.to(running), alpha=factor)


class ShardBuffers:
    """Keeps what forwards of single shards do to the buffers of one module. Raises NotDeterministicError for layers
    whose statistics span shards."""

    def __init__(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            if "SyncBatchNorm" in type(part).__name__:
                raise NotDeterministicError(
                    f"{name or 'the model'} is a {type(part).__name__}, whose statistics span the workers of a step; a "
                    "deterministic job has them by shard, use torch.nn.BatchNorm2d and the like"
                )
        self._module = module
        # at the step's first forward: parameters, what changes of them show in, and what the modules hold
        self._parameters: dict[str, torch.Tensor] = {}
        self._marks: list[tuple[int, ...]] = []
        self._modules: list[nn.Module] = []  # kept alive: the id of one that is gone may be another's
        self._holders: list[dict[str, Any]] = []
        self._held: list[int] = []
        self._steps = 0
        self._silent: set[str] = set()  # large buffers that were seen to change without a new version
        self._all = ModuleBuffers(module)
        self._layers = [
            _Layer(name or type(part).__name__, part, self)
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and part.running_mean is not None
        ]
        self.is_computing = False
        """A forward of a shard's training runs."""
        self._kept: dict[str, _Kept] = {}
        self._of_step: Shard | None = None
        self._rows: list[tuple[int, torch.Tensor]] = []
        self._of_first: dict[str, torch.Tensor] = {}
        self.has_changed = False
        """A forward of the step changed a buffer that is no BatchNorm layer's."""

    @property
    def is_in_step(self) -> bool:
        """Whether a forward in training of the step has begun."""
        return self._of_step is not None

    # -- in the course of a step

    def forward_begins(self, shard: Shard) -> None:
        """Begins a forward in training of this shard; several of one shard are one forward. Raises
        NotDeterministicError if the script has changed a parameter since the step's first one."""
        self.is_computing = True
        if self._of_step is shard:
            return
        if self._of_step is None:
            self._steps += 1
            self._parameters = dict(self._module.named_parameters())
            self._marks = self._marks_now()
            self._modules = list(self._module.modules())
            self._holders = [held for m in self._modules for held in (m._parameters, m._modules) if held]
            self._held = self._held_now()
            self._keep()
        else:
            self._check_parameters(shard)
            self._put_back()
        self._of_step = shard
        for layer in self._layers:
            layer.found = []

    def shard_computed(self, shard: Shard) -> None:
        """Records what the forwards of the shard changed, when they are done. Raises NotDeterministicError as
        forward_begins."""
        self.is_computing = False
        if self._of_step is not shard:
            return  # a backward without a forward of this module
        self._check_parameters(shard)
        changed = self._changed()
        self.has_changed |= bool(changed)
        if shard.shard == 0:
            self._of_first = {name: kept.buffer.detach().clone() for name, kept in changed.items()}
        if shard.shard is not None and self._layers:
            self._rows.append((shard.shard, self._row()))

    def check_without_gradients(self) -> None:
        """Checks a forward without gradients that begins within a step. Raises NotDeterministicError if it would change
        running statistics."""
        layer = next((layer for layer in self._layers if layer.is_updating), None)
        if layer is not None:
            raise NotDeterministicError(
                f"{layer.name} would update its running statistics in a forward without gradients, which runs once a "
                "shard; call eval() on the model for it"
            )

    def _check_parameters(self, shard: Shard) -> None:
        """Checks that no parameter changed since the step's first forward. A loop body runs once a shard, so as often
        as this worker has shards."""
        if shard.shard is None:
            return  # a state may be copied in meanwhile, and what this worker computes does not count
        marks = self._marks_now()
        if marks == self._marks and self._held_now() == self._held:
            return
        named = dict(self._module.named_parameters())
        pairs = zip(self._parameters.items(), marks, self._marks, strict=True)
        name = next(
            (n for (n, p), now, was in pairs if n in named and (named[n] is not p or now != was)), None
        )
        if name is None:
            return  # others were added, or some removed
        raise NotDeterministicError(
            f"{name} was changed by the script, or in a forward, within a step: both run once a shard, and so "
            "more often on a worker with more shards. Change it by an optimizer, or between two epochs"
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send: the module has no buffers."""
        return not self._layers and not self._all.named()

    @property
    def row_length(self) -> int:
        """The length of a shard's row, which holds for each layer whether it computed, its mean and its variance."""
        return sum(1 + 2 * layer.width for layer in self._layers)

    @property
    def device(self) -> torch.device:
        for layer in self._layers:
            if layer.module.running_mean is not None:
                return layer.module.running_mean.device
        return torch.device("cpu")

    def rows(self) -> list[torch.Tensor]:
        """Returns the rows of this worker's shards, in order: [row_length], float64, on `device`."""
        return [row for _, row in self._rows]

    def apply_statistics(self, rows: Sequence[torch.Tensor]) -> None:
        """Applies the rows of all shards, in order, to the running statistics. The step is final."""
        with torch.no_grad():
            for row in rows:
                at = 0
                for layer in self._layers:
                    width = layer.width
                    mean, variance = row[at + 1 : at + 1 + 2 * width].view(2, width)
                    if float(row[at]):
                        layer.apply(mean, variance)
                    at += 1 + 2 * width

    def others(self, of_first: bool) -> list[torch.Tensor]:
        """Returns the buffers that are no BatchNorm layer's. of_first: as shard 0 left them, on the worker that
        computed it."""
        self._put_back()
        named = self._named()
        if of_first:
            with torch.no_grad():
                for name, values in self._of_first.items():
                    named[name].copy_(values)
        return list(named.values())

    def forget(self) -> None:
        """Drops what the step's forwards left: the step is over, or did not happen."""
        self.is_computing = self.has_changed = False
        self._of_step = None
        self._rows, self._of_first = [], {}
        for layer in self._layers:
            layer.found = []

    def close(self) -> None:
        """Removes all hooks."""
        for layer in self._layers:
            for hook in layer.hooks:
                hook.remove()

    # -- the parts

    @property
    def _is_audited(self) -> bool:
        """Whether the step finds writes through .data, at the cost of a pass over the values."""
        return self._steps <= AUDITED_STEPS or self._steps % AUDIT_EVERY == 0

    def _marks_now(self) -> list[tuple[int, ...]]:
        """Returns, for each parameter of the step's first forward, what a change of it shows in. A write through .data
        leaves the version, so in audited steps that is also the sum of the bytes."""
        parameters = self._parameters.values()
        if not self._is_audited:
            return [(p._version, p.data_ptr()) if type(p) is nn.Parameter else version(p) for p in parameters]
        return [(*version(p), int(_as_integers(p).sum(dtype=torch.int64))) for p in parameters]

    def _held_now(self) -> list[int]:
        """Returns the ids of the parameters and submodules that the modules of the step's first forward hold. If they
        are the same ones, so are the module's parameters; named_parameters would cost more than all other checks."""
        return list(map(id, chain.from_iterable(held.values() for held in self._holders)))

    def _row(self) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for layer in self._layers:
            found = layer.found or [torch.zeros(2 * layer.width, dtype=torch.float64, device="cpu")]
            parts += [torch.tensor([float(bool(layer.found))], dtype=torch.float64, device="cpu"), *found]
        return torch.cat([part.detach().to(self.device, torch.float64) for part in parts])

    def _named(self) -> dict[str, torch.Tensor]:
        of_layers = {
            id(buffer)
            for layer in self._layers
            for buffer in layer.module._buffers.values()
            if buffer is not None
        }
        return {name: buffer for name, buffer in self._all.named().items() if id(buffer) not in of_layers}

    def _keep(self) -> None:
        """Keeps the values of the step's begin. Most buffers are constants, so copies are kept from step to step."""
        before, self._kept = self._kept, {}
        for name, buffer in self._named().items():
            known = before.get(name)
            if known is None or self._differs(name, known, buffer):
                known = _Kept.of(buffer, buffer.detach().clone())
            self._kept[name] = known

    def _differs(self, name: str, known: _Kept, buffer: torch.Tensor) -> bool:
        """Tells whether the buffer has changed since `known`. Writes through .data leave the version, so values are
        compared too: of large buffers, most of which are constants, in some steps, and always once that has found one.
        """
        if known.buffer is not buffer or known.version != buffer._version:
            return True
        if buffer.nbytes > LARGE_BYTES and name not in self._silent and not self._is_audited:
            return False
        if (
            known.integers is not None
            and buffer.data_ptr() == known.address
            and buffer.shape == known.values.shape
            and buffer.is_contiguous()
        ):
            differs = not torch.equal(*known.integers)
        else:
            differs = not _same_bytes(known.values, buffer)
        if differs:
            self._silent.add(name)
        return differs

    def _changed(self) -> dict[str, _Kept]:
        """Returns the buffers that a forward changed in place, or replaced, since the step's begin."""
        found = {}
        for name, buffer in self._named().items():
            known = self._kept.get(name)
            if known is None or self._differs(name, known, buffer):
                values = buffer if known is None else known.values
                found[name] = _Kept.of(buffer, values)
        return found

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, found in self._changed().items():
                if found.buffer.shape != found.values.shape:
                    raise NotDeterministicError(
                        f"{name} got another shape in a forward ({list(found.values.shape)} before, "
                        f"{list(found.buffer.shape)} now), as the buffers of some quantization observers do in their "
                        "first one; in a deterministic job each shard begins with the buffers of the step's begin. Run "
                        "one forward before the model is wrapped"
                    )
                found.buffer.copy_(found.values)
                self._kept[name] = _Kept.of(found.buffer, found.values)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether both tensors have the same bytes, also those of NaN, which equals nothing."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_as_integers(one), _as_integers(other))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes as whole numbers of its elements' size: far fewer than bytes."""
    width = min(tensor.dtype.itemsize, 8)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return tensor.detach().reshape(-1).view(whole)
