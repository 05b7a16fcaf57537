"""Wraps a model in place: the model keeps its type, and trains together with its peers.

Owns the way from this surface's `with_bagua` and DistributedDataParallel to the core's, the calls around forward and
optimizer, and the agreement of workers that joined before they had a model. When steps begin and end is loop_steps.py.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bagua_core import collectives
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.optimizers.optimizer_gate import gate_optimizer
from bagua_core.parallel import DistributedDataParallel
from bagua_core.torch_api.algorithms.base import Algorithm, ScriptModel
from bagua_core.torch_api.algorithms.own import prepared
from bagua_core.torch_api.bucket import BaguaBucket
from bagua_core.torch_api.env import get_default_bucket_size
from bagua_core.torch_api.errors import ModelsDifferError, NoOptimizerError
from bagua_core.torch_api.in_place import AfterForward, BeforeForward, NoSync
from bagua_core.torch_api.optimizers_made import optimizers_of
from bagua_core.torch_api.process_group import DEFAULT_GROUP, BaguaProcessGroup
from bagua_core.torch_api.script_world import Script, this_script


class Unforwarded(nn.Module):
    """Holds `model` for the core where the script goes on calling the model itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **keywords: Any) -> None:
        return None


class Wrapped:
    """The handle of one wrapped model.

    parallel: the core's side of it. algorithm: as the script named it. is_released: the model was wrapped again since.
    """

    def __init__(
        self,
        script: Script,
        parallel: DistributedDataParallel,
        own: ScriptModel | None = None,
        algorithm: Any = None,
    ) -> None:
        self.script = script
        self.parallel = parallel
        self.algorithm = own.impl if own is not None else algorithm
        self.is_released = False
        self.hooks: list[RemovableHandle] = []  # on a model that was wrapped in place
        self._own = own
        self._observed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        for optimizer in parallel.optimizers:
            self._observe(optimizer)
        _agree(script, self)

    @property
    def exchange(self) -> Any:
        """The exchange of the algorithm for this model; see communication/reduction/exchange.py."""
        return self.parallel._exchange

    def buckets(self) -> list[BaguaBucket]:
        """Returns the model's `bagua_buckets`; see module_attributes.py."""
        if self._own is not None:
            return list(self._own.bagua_buckets)
        exchange = self.exchange
        if not isinstance(exchange, Reducer):
            return []
        return [
            BaguaBucket(str(number), parameters, bucket, None)
            for number, (bucket, parameters) in enumerate(exchange.buckets_of_parameters())
        ]

    def counts(self, training: bool) -> bool:
        """Tells whether the runtime takes part in the forward that begins now."""
        return torch.is_grad_enabled() and self.script.steps.counts(training)

    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        """Prepares a forward that counts, before the core's part of it. Raises NoOptimizerError."""
        if not self.parallel.optimizers:
            self._adopt_optimizers()
        self.script.steps.forward_begins(self.parallel.optimizers)
        if self._own is not None:
            self._own.forward_pre_hook(inputs)

    def _adopt_optimizers(self) -> None:
        found = optimizers_of(self.parallel.parameters())
        if not found and not self.script.steps.marked_by_script:
            raise NoOptimizerError(
                "no optimizer of this model is known, so nothing says when a step ends; pass optimizers=[optimizer], "
                "or call bagua.next_step() at the top of each iteration"
            )
        self.script.engine.registry.add_optimizers(found)
        for optimizer in found:
            self.parallel.optimizers.append(optimizer)
            gate_optimizer(optimizer, self.script.engine)
            self._observe(optimizer)

    def _observe(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the optimizer's step() by one that reports each call, outside the gate that decides whether it
        acts."""
        if optimizer in self._observed:
            return
        self._observed.add(optimizer)
        gated: Callable[..., Any] = optimizer.step
        script, own = self.script, self._own

        handle = self

        @functools.wraps(gated)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = gated(*args, **kwargs)
            engine = script.engine
            if handle.is_released:
                return result
            if own is not None and engine.in_step and not engine.step_failed and engine.micro_batch.last:
                own.post_optimizer_step_hook(self)
            script.steps.optimizer_stepped(self)
            return result

        # a bound method, because a scheduler made later takes it apart by __func__
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


_wrapped: weakref.WeakKeyDictionary[nn.Module, Wrapped] = weakref.WeakKeyDictionary()


def find_wrapped(model: nn.Module) -> Wrapped | None:
    """Returns the handle of `model`; None for a model that was not wrapped."""
    return _wrapped.get(model)


def wrapped(model: nn.Module) -> Wrapped:
    """Returns the handle of `model`. Raises ValueError for a model that was not wrapped."""
    found = find_wrapped(model)
    if found is None:
        raise ValueError(f"this {type(model).__name__} was not wrapped; call with_bagua on it first")
    return found


def register(model: nn.Module, handle: Wrapped) -> None:
    _wrapped[model] = handle


def release(model: nn.Module) -> None:
    """Ends the wrapping that `model` has, if it has one: another algorithm follows. All workers must come here at the
    same place. Raises ValueError in a step, and in a script that workers may join at any time."""
    handle = _wrapped.get(model)
    if handle is None:
        return
    if not handle.parallel.is_detached:  # else bagua.shutdown() has ended its training
        _prepare_release(type(model).__name__, handle.script)
    handle.is_released = True
    for hook in handle.hooks:
        hook.remove()
    if handle.hooks and isinstance(model.__dict__.get("no_sync"), NoSync):
        del model.__dict__["no_sync"]
    handle.parallel.detach()
    for known in [m for m, one in _wrapped.items() if one is handle]:
        del _wrapped[known]


def _prepare_release(kind: str, script: Script) -> None:
    """Makes sure that all workers may release the model here. Raises ValueError as `release` does."""
    if script.world.elastic or script.steps.marked_by_script:
        raise ValueError(
            f"this {kind} is wrapped already, and a worker that joins now would begin with its first algorithm; "
            "only a plain loop (no ElasticDataLoader, no next_step) can change the algorithm of a model"
        )
    if script.engine.in_step:
        raise ValueError(
            f"this {kind} is in the middle of a step; wrap it with another algorithm after optimizer.step()"
        )
    if script.world.joined:
        collectives.barrier()  # no worker is a step behind: it would heal from one that has another algorithm


def check_ignored(model: nn.Module) -> None:
    """Raises ValueError for a model that names parameters to leave out."""
    for attribute in ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"):
        names = list(getattr(model, attribute, ()))
        if names:
            raise ValueError(
                f"{attribute} names {', '.join(map(str, names[:5]))}: every parameter that trains is shared, for a "
                "worker that is lost must not take any with it. Freeze them (requires_grad = False), or delete the "
                "attribute and let them be shared"
            )


def check_group(process_group: object) -> None:
    """Raises ValueError for a group that is only a part of the workers."""
    if process_group is None:
        return
    if isinstance(process_group, BaguaProcessGroup) and len(process_group.ranks) == DEFAULT_GROUP.size():
        return
    raise ValueError(
        "process_group: a model is trained by all workers of the job. Leave process_group out; to average over a part "
        "of the workers, call allreduce_inplace(gradient, ReduceOp.AVG, comm=group) on each gradient after backward, "
        "and don't wrap the model"
    )


def with_bagua(
    self: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Any,
    process_group: BaguaProcessGroup | None = None,
    do_flatten: bool = True,
) -> nn.Module:
    """Trains this model together with all workers of the job from now on; returns the very same model.

    optimizers: those that step on its parameters.
    algorithm: of bagua_core.torch_api.algorithms, of bagua_core.algorithms, or the name of one.
    process_group: None, or the group of all workers.
    do_flatten: gradients lie in buckets anyway.

    In a plain loop a model may be wrapped again with another algorithm, between two steps: all workers then go on with
    rank 0's parameters. Raises ValueError, TypeError, SparseGradientError, ModelsDifferError.
    """
    script = this_script()
    script.world.join()
    check_group(process_group)
    check_ignored(self)
    release(self)
    attach(script, self, optimizers, algorithm)
    return self


def attach(
    script: Script, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm: Any
) -> Wrapped:
    """Wraps `model` for a given script, as with_bagua does. Returns its handle."""
    own, chosen = reified(algorithm, model, optimizers)
    parallel = DistributedDataParallel(
        # None: the optimizers that the script makes are found at the first forward
        Unforwarded(model),
        optimizers=optimizers or None,
        algorithm=chosen,
        bucket_cap_mb=get_default_bucket_size() / (1 << 20),
        engine=script.engine,
    )
    handle = Wrapped(script, parallel, own, algorithm)
    register(model, handle)
    after = AfterForward(model)
    handle.hooks = [
        model.register_forward_pre_hook(BeforeForward(model, handle, after), prepend=True),
        model.register_forward_hook(after, always_call=True),
    ]
    if not hasattr(model, "no_sync"):
        model.__dict__["no_sync"] = NoSync(parallel.no_sync)
    return handle


def reified(
    algorithm: Any, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[ScriptModel | None, Any]:
    """Returns the core's algorithm, and for one that the script has written the model as that one sees it."""
    if not isinstance(algorithm, Algorithm):
        return None, algorithm  # a name, or one of the core's; whatever it is, the core checks it
    return prepared(algorithm, model, optimizers)


# -- workers that joined before they had a model


def _agree(script: Script, handle: Wrapped) -> None:
    """Copies rank 0's model and optimizers to all workers, once it is sure that these fit. Raises ModelsDifferError."""
    if not script.world.joined:
        return  # they become equal when the job's first generation is entered
    rank, world_size = script.engine.place_of_script()
    if world_size == 1:
        return
    parallel, registry = handle.parallel, script.engine.registry
    registry.check_travels()
    described = {
        **registry.fingerprint(),
        "algorithm": parallel.algorithm_name,
    }
    of_first = collectives.broadcast_object(described, 0)
    if of_first != described:
        differing = ", ".join(
            f"{what}: rank 0 has {of_first.get(what)!r}, this worker {described.get(what)!r}"
            for what in described
            if of_first.get(what) != described[what]
        )
        raise ModelsDifferError(f"workers wrapped different models: {differing}")
    tensors = registry.capture()["modules"][-1]
    states = [optimizer.state_dict() for optimizer in parallel.optimizers]
    brought = collectives.broadcast_object({"tensors": tensors, "optimizers": states}, 0)
    if rank != 0:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(brought["tensors"][name])
        for optimizer, state in zip(parallel.optimizers, brought["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    parallel.communicator_changed()
