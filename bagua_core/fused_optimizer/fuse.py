"""Provides fuse_optimizer: it returns the very optimizer that the script has, whose step works on few tensors from now
on."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from bagua_core.fused_optimizer.compiled_step import CompiledStep, why_no_compiler
from bagua_core.fused_optimizer.errors import FusedOptimizerError, PerParameterError
from bagua_core.fused_optimizer.foreach_step import ForeachStep
from bagua_core.fused_optimizer.fused_step import FusedStep
from bagua_core.fused_optimizer.layout_choice import CutOrNot, LayoutChoice
from bagua_core.fused_optimizer.options import for_each_parameter, switches
from bagua_core.fused_optimizer.state_layout import attributes_of_script, reads_attributes
from bagua_core.fused_optimizer.trial import (
    TrialVerdict,
    judge,
    kinds_of,
    same_with_foreach,
)
from bagua_core.model.sharded_tensors import is_sharded

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_fused: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[FusedStep, tuple[bool, ...]]] = (
    weakref.WeakKeyDictionary()
)


def fuse_optimizer(
    optimizer: Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    compile: bool = False,
    strict: bool = False,
) -> Optimizer:
    """Makes `optimizer` step on blocks of parameters instead of on each parameter; returns the very same object.

    It takes any torch optimizer that works on each element by itself, found out by a trial on small parameters. Results
    are those of the optimizer alone; its state_dict, groups, hooks and `isinstance` are as before. `fuse_step` is
    another name of its step. A copy or a pickle of it is not fused. Doing it twice is harmless.

    do_flatten: parameters below a size may be given other memory, in which they lie one after the other; False leaves
    all where they are, and fuses only those that lie so already or are larger than a block. check_flatten: look before
    each step whether parameters still lie where they did. False takes it for granted. compile: compile the step by
    torch.compile, equal within rounding; on the CPU that needs a C++ compiler, without which it warns and does not
    compile. strict: raise PerParameterError for an optimizer that works on parameters as wholes (LAMB, Muon), instead
    of warning once and stepping its parameters as they are. Raises TypeError, FusedOptimizerError (twice, with other
    settings; compile with an optimizer's own fused=True), PerParameterError.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fuse_optimizer({type(optimizer).__name__}): not a torch.optim.Optimizer; pass the optimizer itself"
        )
    settings = (do_flatten, check_flatten, compile, strict)
    known = _fused.get(optimizer)
    if known is not None:
        if known[1] != settings:
            raise FusedOptimizerError(
                f"this {type(optimizer).__name__} is fused already, with other settings "
                "(do_flatten, check_flatten, compile, strict): "
                f"{known[1]}, now {settings}; fuse it once"
            )
        return optimizer
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        raise FusedOptimizerError(
            f"this {type(optimizer).__name__} has sharded parameters (DTensor), whose memory fully_shard keeps; leave "
            "fuse_optimizer out, or give the optimizer its own foreach=True or fused=True"
        )
    judgement = _Judgement(strict)
    if any(judgement(optimizer)) and reads_attributes(optimizer):  # now, and not in the middle of training
        _warn_of_attributes(optimizer)
    step = FusedStep(
        judgement,
        moves=do_flatten,
        looks_at_memory=check_flatten,
        compiled=CompiledStep() if compile and _can_compile(optimizer) else None,
        otherwise=ForeachStep(same_with_foreach),
        choice=LayoutChoice(CutOrNot()),
    )
    _attach(optimizer, step)
    _fused[optimizer] = step, settings
    return optimizer


def _warn_of_attributes(optimizer: torch.optim.Optimizer) -> None:
    found = [attributes_of_script(p) for group in optimizer.param_groups for p in group["params"]]
    if names := dict.fromkeys(name for each in found for name in each):
        warnings.warn(
            f"{sum(map(bool, found))} of {len(found)} parameters have attributes that {type(optimizer).__name__} may "
            f"read in its step ({', '.join(names)}), and are stepped as they are, unfused. Numbers that differ between "
            "parameters can be options of parameter groups; attributes that no step reads can be deleted",
            stacklevel=3,
        )


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether fuse_optimizer has changed the step of `optimizer`."""
    return optimizer in _fused


def _can_compile(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the step can be compiled. Warns if there is no compiler. Raises FusedOptimizerError."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            raise FusedOptimizerError(
                f"compile=True with {type(optimizer).__name__}(fused=True): that is one pass already; "
                "leave one of both out"
            )
        for parameter in group["params"]:
            reason = why_no_compiler(parameter.device)
            if reason is not None:
                warnings.warn(
                    f"compile=True: {reason}. The step works on blocks without being compiled", stacklevel=3
                )
                return False
    return True


def _attach(optimizer: torch.optim.Optimizer, step: FusedStep) -> None:
    last = optimizer.register_step_pre_hook(step.before)
    first = optimizer.register_step_post_hook(step.after)
    optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
    if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # not in each that is made around another
        optimizer.register_state_dict_pre_hook(step.before_state_dict)
    register = optimizer.register_step_pre_hook

    def register_step_pre_hook(self: torch.optim.Optimizer, hook: Any) -> RemovableHandle:
        handle = register(hook)
        self._optimizer_step_pre_hooks.move_to_end(last.id)  # type: ignore[attr-defined]
        return handle

    def fuse_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)

    # Blocks are filled after all that the script's own hooks do to gradients, and brought home before they look at
    # states.
    attached: Any = optimizer
    attached.register_step_pre_hook = types.MethodType(register_step_pre_hook, optimizer)
    attached.fuse_step = types.MethodType(fuse_step, optimizer)


# Of torch's own optimizers; a trial takes 0.1 to 0.3 s, and these keep nothing that it could depend on.
_of_torch: dict[Hashable, TrialVerdict] = {}


def _verdict(optimizer: torch.optim.Optimizer, group: int, switched: Hashable) -> TrialVerdict:
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return judge(optimizer, group)
    key = kind, kind.step, switched, for_each_parameter(optimizer.param_groups[group])
    if key not in _of_torch:
        _of_torch[key] = judge(optimizer, group)
    return _of_torch[key]


class _Judgement:
    """Decides for each group whether its parameters may share blocks.

    It is tried once for each way in which options are switched, and each precision.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._verdicts: dict[Hashable, TrialVerdict] = {}
        self._has_warned = False

    def __call__(self, optimizer: torch.optim.Optimizer) -> Sequence[bool]:
        """Returns for each group whether its parameters may share blocks. Raises PerParameterError."""
        return [self._of(optimizer, number) for number in range(len(optimizer.param_groups))]

    def _of(self, optimizer: torch.optim.Optimizer, group: int) -> bool:
        options = optimizer.param_groups[group]
        key = switches(options), frozenset(kinds_of(options["params"]))
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = _verdict(optimizer, group, key)
            if not verdict.is_elementwise:
                self._say(optimizer, group, verdict)
        return verdict.is_elementwise

    def _say(self, optimizer: torch.optim.Optimizer, group: int, verdict: TrialVerdict) -> None:
        name = type(optimizer).__name__
        why = f"{name} (parameter group {group}) does not work on each element by itself: {verdict.reason}"
        if self._strict:
            raise PerParameterError(
                f"{why}. Leave strict=True out to have these parameters stepped as they are"
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{why}. Its parameters are stepped as they are, unfused", stacklevel=4)
