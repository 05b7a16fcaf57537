"""Tells what of an optimizer's state can lie in a block: one value for each element, or one that all members share.

Pure over one parameter and its state. What fits neither way leaves the parameter to the optimizer as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from bagua_core.errors import BaguaError

# Attributes that frameworks set on parameters for themselves: no optimizer's step reads them.
_MARKS = frozenset(
    (
        "_is_hf_initialized",  # transformers
        *("allreduce", "partition_dim", "partition_stride", "sequence_parallel", "shared"),  # Megatron
        *("shared_embedding", "tensor_model_parallel", "is_embedding_or_output_parameter"),
    )
)
_PREFIXES_OF_MARKS = ("_dynamo_", "_ddp_", "_fsdp_", "_bagua_")


class NotBlockwise(BaguaError, ValueError):
    """Something that has no place in a block; the message says what."""


def is_elementwise(value: Any, parameter: Tensor) -> bool:
    """Tells whether `value` is a tensor with one value for each element of `parameter`."""
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.layout is torch.strided
        and value.device == parameter.device
    )


def is_scalar_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.layout is torch.strided


def is_plain(value: Any) -> bool:
    """Tells whether `value` cannot be changed in place, so that many may hold it."""
    return value is None or isinstance(value, (bool, int, float, str))


def kind_of_state(parameter: Tensor, state: Mapping[Any, Any]) -> Hashable:
    """Returns a key that is equal for parameters whose states can share a block: the same names, types and shared
    values.

    Reads scalar tensors, which waits for a GPU. Raises NotBlockwise.
    """
    return tuple((name, _kind(name, value, parameter)) for name, value in state.items())


def _kind(name: Any, value: Any, parameter: Tensor) -> Hashable:
    if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
        raise NotBlockwise(f"state {name!r} is a {type(value).__name__}")
    if is_elementwise(value, parameter):
        return "elementwise", value.dtype
    if is_scalar_tensor(value):
        return "shared", value.dtype, value.device, repr(value.item())
    if is_plain(value):
        return "plain", type(value), repr(value)
    what = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
    raise NotBlockwise(f"state {name!r} of a parameter of shape {tuple(parameter.shape)} is {what}")


def attributes_of_script(parameter: Tensor) -> list[str]:
    """Returns the names of attributes on it that a step may read, as an optimizer does that looks for `p.lr_scale`."""
    return [n for n in vars(parameter) if n not in _MARKS and not n.startswith(_PREFIXES_OF_MARKS)]


def reads_attributes(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the optimizer's step may read attributes of parameters; torch's own optimizers read none."""
    return not type(optimizer).__module__.startswith("torch.optim.")


def why_not_in_a_block(parameter: Tensor, *, reads_attributes: bool) -> str | None:
    """Returns why the parameter's memory cannot be a block or a part of one; None if it can, whatever its state is."""
    if type(parameter) not in (Tensor, torch.nn.Parameter):
        return f"it is a {type(parameter).__name__}"
    if parameter.layout is not torch.strided or parameter.is_quantized or parameter.device.type == "meta":
        return "it is not plain memory"
    if parameter.dim() == 0:
        return "it has no dimension, as numbers that count steps have none"
    if parameter.is_conj() or parameter.is_neg():
        return "it is a lazily conjugated or negated view"
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return "its memory has gaps"
    if reads_attributes and vars(parameter) and (names := attributes_of_script(parameter)):
        return f"the script has set attributes on it: {', '.join(names)}"
    return None
