"""Checks that the gradients which an optimizer is about to use are the job's.

Each engine has one list of wrapped models. A gated optimizer is checked at each step. An optimizer that was not passed
to DistributedDataParallel is refused when it steps on a wrapped model's parameters. Every error names the parameters.
The checks know nothing of buckets: a wrapped model says what it reduces (communication/reduction/exchange.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bagua_core.communication.reduction.trained_parameters import listed
from bagua_core.errors import UserError


class NotReducedError(UserError, RuntimeError):
    """Raised if an optimizer is about to use gradients that were not reduced over the job."""


class SharedParametersError(UserError, ValueError):
    """Raised if two wrapped models would reduce the same parameter."""


class UngatedOptimizerError(UserError, RuntimeError):
    """Raised if an optimizer that was not passed to DistributedDataParallel steps on a wrapped model's parameters."""


class CheckedModel(Protocol):
    """A DistributedDataParallel as the checks see it."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def equal_states(self) -> bool:
        """Whether the optimizer sees the same gradients on all ranks."""

    @property
    def layout_version(self) -> int:
        """A number that changes when `reduces` may answer differently."""

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Tells whether the model's algorithm acts on this parameter's gradient."""

    def unreduced(self) -> str | None:
        """Returns why .grad may not be the job's gradient at this moment; None if it is."""

    def holds_reduced(self, parameter: torch.Tensor) -> bool:
        """Tells whether .grad is the memory that a reduction left there."""


class ScriptChecks:
    """Checks the gradients of the wrapped models of one engine."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[CheckedModel]] = []
        self._strange: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[list[int], list[tuple[str, torch.Tensor]]]
        ] = weakref.WeakKeyDictionary()

    def models(self) -> list[CheckedModel]:
        found = [model for reference in self._models if (model := reference()) is not None]
        if len(found) < len(self._models):
            self._models = [weakref.ref(model) for model in found]
        return found

    def add(self, model: CheckedModel) -> None:
        """Adds a model that is wrapped."""
        self._models.append(weakref.ref(model))
        _refuse_ungated_optimizers()

    def remove(self, model: CheckedModel) -> None:
        """Removes a model that is not wrapped any more."""
        self._models = [reference for reference in self._models if reference() not in (None, model)]

    def check_unshared(self, model: CheckedModel, trained: Iterable[torch.Tensor]) -> None:
        """Raises SharedParametersError if another model reduces one of `trained`, which `model` is about to reduce."""
        others = [other for other in self.models() if other is not model]
        shared = [p for p in trained if any(other.reduces(p) for other in others)]
        if shared:
            names = listed(self._names(shared, [*others, model]))
            raise SharedParametersError(
                f"{names}: another wrapped model reduces these parameters too, so their "
                "gradients would be reduced twice. Wrap one module that contains both models"
            )

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks the gradients of `optimizer`, which is about to step. Raises NotReducedError."""
        models = self.models()
        if not models:
            return
        kind = type(optimizer).__name__
        without = [name for name, p in self._strange_to(optimizer, models) if p.grad is not None]
        if without:
            raise NotReducedError(
                f"{kind} is about to step on parameters whose gradients no wrapped model reduces, so each worker would "
                f"use its own: {listed(without)}. Wrap the module that holds them once it has all of its parameters"
            )
        for model in models:
            why = model.unreduced()
            if why is None:
                continue
            local = [
                p
                for p in _parameters_of(optimizer)
                if p.grad is not None and model.reduces(p) and not model.holds_reduced(p)
            ]
            if local:
                raise NotReducedError(
                    f"{kind} is about to use gradients that were not reduced over the job, for {why}: "
                    f"{listed(self._names(local, [model]))}. Call the optimizer after a backward() through the "
                    "wrapped model has returned; gradients of torch.autograd.grad are each worker's own"
                )

    def has_equal_states(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells whether all models whose parameters the optimizer moves keep their replicas equal."""
        unequal = [model for model in self.models() if not model.equal_states]
        return not any(m.reduces(p) for m in unequal for p in _parameters_of(optimizer))

    def wrapped_parameters_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Returns the names of the optimizer's parameters that a wrapped model reduces."""
        models = self.models()
        return self._names(
            [p for p in _parameters_of(optimizer) if any(m.reduces(p) for m in models)], models
        )

    def _strange_to(
        self, optimizer: torch.optim.Optimizer, models: list[CheckedModel]
    ) -> list[tuple[str, torch.Tensor]]:
        """Returns the optimizer's parameters that no model reduces. Finds them anew when groups or models have
        changed."""
        version = [len(group["params"]) for group in optimizer.param_groups]
        version += [model.layout_version for model in models]
        known = self._strange.get(optimizer)
        if known is None or known[0] != version:
            strange = [p for p in _parameters_of(optimizer) if not any(m.reduces(p) for m in models)]
            known = (version, list(zip(self._names(strange, models, optimizer), strange, strict=True)))
            self._strange[optimizer] = known
        return known[1]

    def _names(
        self,
        parameters: list[torch.Tensor],
        models: Iterable[CheckedModel],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> list[str]:
        names: dict[int, str] = {}
        if parameters:
            for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
                for place, p in enumerate(group["params"]):
                    names[id(p)] = f"param_groups[{number}]['params'][{place}] of shape {tuple(p.shape)}"
            for model in models:
                names.update({id(p): name for name, p in model.module.named_parameters()})
        return [names[id(p)] for p in parameters]


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers. One may be of another class: it has parameters and steps. Raises TypeError."""
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(f"optimizers is one {type(optimizers).__name__}; pass optimizers=[optimizer]")
    found = list(optimizers or ())
    for each in found:
        if not (hasattr(each, "step") and hasattr(each, "param_groups")):
            raise TypeError(
                f"optimizers contains {each!r}, which is no optimizer; pass optimizers=[optimizer], and schedulers to "
                "bagua_core.register_state"
            )
    return found


_of_engine: weakref.WeakKeyDictionary[object, ScriptChecks] = weakref.WeakKeyDictionary()


def checks_of(engine: object) -> ScriptChecks:
    """Returns the engine's checks; there are some from the first call on."""
    found = _of_engine.get(engine)
    if found is None:
        found = _of_engine[engine] = ScriptChecks()
    return found


def engine_that_trains(parameters: Iterable[torch.Tensor]) -> object | None:
    """Returns the engine with a wrapped model that reduces one of `parameters`; None if there is none."""
    known = [(engine, model) for engine, checks in _of_engine.items() for model in checks.models()]
    return next((engine for p in parameters for engine, model in known if model.reduces(p)), None)


def is_part_of_model(engine: object, found: object) -> bool:
    """Tells whether `found` is a module within a wrapped model of this engine."""
    return any(part is found for model in checks_of(engine).models() for part in model.module.modules())


# -- optimizers that were passed to no wrapped model


class _Inside(threading.local):
    """The gated steps under way in this thread; entered for each of them."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_inside = _Inside()
_installed: list[Any] = []


def gated_step() -> AbstractContextManager[None]:
    """Returns a context that marks the step of a gated optimizer; optimizers that it steps in turn are its own
    affair."""
    return _inside


def _refuse_ungated_optimizers() -> None:
    if not _installed:
        hook: Callable[..., None] = _before_any_step
        _installed.append(register_optimizer_step_pre_hook(hook))


def _before_any_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Refuses an ungated optimizer; torch calls it before each optimizer's own step. Raises UngatedOptimizerError."""
    if torch.compiler.is_compiling() or _inside.depth:  # a compiled step would break its graph here
        return
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        return  # it moves nothing: scripts do so before the loop, to quiet the warning of a scheduler
    for checks in list(_of_engine.values()):
        names = checks.wrapped_parameters_of(optimizer)
        if names:
            raise UngatedOptimizerError(
                f"this {type(optimizer).__name__} steps on parameters of a wrapped model and was not passed to "
                f"DistributedDataParallel: {listed(names)}. It would step in failed steps too, and workers that join "
                "would not receive its state. Pass optimizers=[...] with all optimizers of the model"
            )
