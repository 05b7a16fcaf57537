"""What does a step do to the elements of a parameter, as a list of operations, and with which numbers this time?

One parameter of a few elements stands for all blocks that are alike. The step runs on it for real while every
operation is written down: those on its elements as a program that can be run on any number of elements, all others
(counting steps, bias corrections) as what they are, numbers. The same program with other numbers is what the next
step will be. Knows nothing of compilers and blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten


class NotRecordable(ValueError):
    """The step is no list of elementwise operations; the message says what is in the way."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program: an input or what an operation made. number: in order of appearance."""

    number: int


@dataclass(frozen=True, slots=True)
class Number:
    """A number of this step, which may be another in the next. place: in Program.numbers."""

    place: int


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor without dimensions of this step. place: in Recording.shared."""

    place: int


@dataclass(frozen=True, slots=True)
class Operation:
    """made: of its result, None where it writes to its first argument and to nothing else."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    made: int | None


@dataclass
class Recording:
    """inputs: the tensors that it began with, the gradient and the states by name among them."""

    inputs: dict[Any, Value]
    operations: list[Operation] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    results: dict[Any, Value] = field(default_factory=dict)

    @property
    def structure(self) -> Hashable:
        """Equal for recordings that are one program with other numbers."""
        return (
            tuple(self.inputs.items()),
            tuple(self.operations),
            len(self.numbers),
            tuple((s.dtype, s.device) for s in self.shared),
            tuple(self.results.items()),
        )


class Recorder(TorchDispatchMode):
    """Writes down what happens to the tensors that it was told of, each in a recording of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Recording, Value]] = {}
        self._alive: list[Tensor] = []  # or the id of one that is gone would name another
        self._count = 0

    def follow(self, inputs: dict[Any, Tensor]) -> Recording:
        recording = Recording({})
        for name, tensor in inputs.items():
            recording.inputs[name] = self._learn(recording, tensor)
        return recording

    def value_of(self, recording: Recording, tensor: Tensor) -> Value:
        """Raises NotRecordable."""
        found = self._known.get(id(tensor))
        if found is None or found[0] is not recording:
            raise NotRecordable("a state comes from elsewhere than the step's own operations")
        return found[1]

    def _learn(self, recording: Recording, tensor: Tensor) -> Value:
        self._alive.append(tensor)
        value = Value(len(recording.inputs) + len(recording.operations))
        self._known[id(tensor)] = recording, value
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
        followed = [self._known[id(t)] for t in tensors if id(t) in self._known]
        if followed:
            self._note(func, args, kwargs, tensors, [r for r, _ in followed], out)
        return out

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        recordings: Sequence[Recording],
        out: Any,
    ) -> None:
        recording = recordings[0]
        name = func._schema.name
        if any(other is not recording for other in recordings):
            raise NotRecordable(f"{name} mixes parameters")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRecordable(f"{name} draws random numbers")
        shape = next(t.shape for t in tensors if id(t) in self._known)
        if not isinstance(out, Tensor) or out.shape != shape:
            raise NotRecordable(f"{name} makes one value of many elements, or another shape")
        if out.is_complex():
            raise NotRecordable("it computes in complex numbers")
        call, arguments, named = _general(func, args, kwargs)
        found = self._known.get(id(out))
        made = None if found is not None else len(recording.inputs) + len(recording.operations)
        operation = Operation(
            call,
            tuple(self._written(recording, func, call, i, a) for i, a in enumerate(arguments)),
            tuple((n, self._written(recording, func, call, n, a)) for n, a in sorted(named.items())),
            made,
        )
        if found is None:
            self._learn(recording, out)
        recording.operations.append(operation)

    def _written(self, recording: Recording, func: Any, call: Any, place: int | str, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            found = self._known.get(id(argument))
            if found is not None:
                return found[1]
            if argument.dim():
                raise NotRecordable(f"{func._schema.name} uses a tensor that is not of the step's own making")
            recording.shared.append(argument.clone())
            return Shared(len(recording.shared) - 1)
        if isinstance(argument, (list, tuple)):
            if any(isinstance(a, Tensor) for a in argument):
                raise NotRecordable(f"{func._schema.name} works on a list of tensors")
            return tuple(argument)
        if _takes_tensor(call, place) and isinstance(argument, (int, float)):
            recording.numbers.append(float(argument))
            return Number(len(recording.numbers) - 1)
        return argument


# -- operations whose numbers are part of the call, as ones that take them as tensors


def _add_scaled(a: Tensor, b: Any, scale: Any) -> Any:
    return a + b * scale


def _add_scaled_(a: Tensor, b: Any, scale: Any) -> Any:
    return a.add_(b * scale)


def _subtract_scaled(a: Tensor, b: Any, scale: Any) -> Any:
    return a - b * scale


def _subtract_scaled_(a: Tensor, b: Any, scale: Any) -> Any:
    return a.sub_(b * scale)


def _addcmul(a: Tensor, b: Tensor, c: Tensor, scale: Any) -> Any:
    return a + b * c * scale


def _addcmul_(a: Tensor, b: Tensor, c: Tensor, scale: Any) -> Any:
    return a.add_(b * c * scale)


def _addcdiv(a: Tensor, b: Tensor, c: Tensor, scale: Any) -> Any:
    return a + b / c * scale


def _addcdiv_(a: Tensor, b: Tensor, c: Tensor, scale: Any) -> Any:
    return a.add_(b / c * scale)


def _lerp(a: Tensor, b: Tensor, weight: Any) -> Any:
    # torch computes weights from a half on from the other end; the two differ by rounding, and choosing costs as much
    return a + (b - a) * weight


def _lerp_(a: Tensor, b: Tensor, weight: Any) -> Any:
    return a.add_((b - a) * weight)


def _fill_where_(a: Tensor, mask: Tensor, value: Any) -> Tensor:
    return a.copy_(torch.where(mask, value, a))


_SCALED: dict[Any, tuple[Callable[..., Any], str]] = {
    aten.add.Tensor: (_add_scaled, "alpha"),
    aten.add_.Tensor: (_add_scaled_, "alpha"),
    aten.sub.Tensor: (_subtract_scaled, "alpha"),
    aten.sub_.Tensor: (_subtract_scaled_, "alpha"),
    aten.addcmul.default: (_addcmul, "value"),
    aten.addcmul_.default: (_addcmul_, "value"),
    aten.addcdiv.default: (_addcdiv, "value"),
    aten.addcdiv_.default: (_addcdiv_, "value"),
}
_WITH_TENSORS: dict[Any, Callable[..., Any]] = {
    aten.lerp.Scalar: _lerp,
    aten.lerp_.Scalar: _lerp_,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul_.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div_.Scalar: aten.div_.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.add_.Scalar: aten.add_.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.sub_.Scalar: aten.sub_.Tensor,
    aten.fill_.Scalar: aten.fill_.Tensor,
    aten.masked_fill_.Scalar: _fill_where_,  # from torch 2.15 on of `x[mask] = number` too
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_min_.default: aten.clamp_min_.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
    aten.clamp_max_.default: aten.clamp_max_.Tensor,
    aten.clamp.default: aten.clamp.Tensor,
    aten.clamp_.default: aten.clamp_.Tensor,
}
_OWN = {_lerp, _lerp_, _fill_where_, *(call for call, _ in _SCALED.values())}


def _general(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    scaled = _SCALED.get(func)
    if scaled is not None:
        call, name = scaled
        if kwargs.get(name, 1) != 1:
            rest = {n: v for n, v in kwargs.items() if n != name}
            return call, (*args, kwargs[name]), rest
        return func, args, {n: v for n, v in kwargs.items() if n != name}
    if func is aten.index_put_.default and len(args) == 3 and _is_one_mask(args[1]) and args[2].dim() == 0:
        return _fill_where_, (args[0], args[1][0], args[2].to(args[0].dtype)), {}
    if func in (
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
    ):  # of `x[mask] = number` too, from torch 2.15 on
        return _fill_where_, args, kwargs
    if func in _WITH_TENSORS:
        return _WITH_TENSORS[func], args, kwargs
    if func in (aten.pow.Tensor_Scalar, aten.pow_.Scalar) and isinstance(args[1], float):
        return (aten.pow.Tensor_Tensor if func is aten.pow.Tensor_Scalar else aten.pow_.Tensor), args, kwargs
    return func, args, kwargs


def _is_one_mask(indices: Sequence[Tensor | None]) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool


def _takes_tensor(call: Any, place: int | str) -> bool:
    """Whether the argument may be a tensor without dimensions instead of a number."""
    if call in _OWN:
        return True
    schema = call._schema.arguments
    argument = schema[place] if isinstance(place, int) else next(a for a in schema if a.name == place)
    return "Tensor" in str(argument.type)


def _copy(a: Tensor, one: Tensor) -> Tensor:
    return a * one if a.is_floating_point() else a.clone()


def _copy_(a: Tensor, b: Tensor, one: Tensor) -> Tensor:
    return a.copy_(b * one if b.is_floating_point() else b)


# torch.compile leaves out a plain copy even where what is copied is written to afterwards, and has the copy show that
# (pytorch/pytorch#198131): the parameters of the step before would be those of the step after.
_COPIES: dict[Any, Callable[..., Any]] = {aten.clone.default: _copy, aten.copy_.default: _copy_}


def as_graph(recording: Recording) -> torch.fx.GraphModule:
    """The program as a function of (inputs in order, numbers [count + 1], shared tensors); returns the list of its
    results. The last number is 1."""
    graph = torch.fx.Graph()
    nodes: dict[int, Any] = {}
    for value in recording.inputs.values():
        nodes[value.number] = graph.placeholder(f"input_{value.number}")
    numbers = graph.placeholder("numbers")
    shared = [graph.placeholder(f"shared_{place}") for place in range(len(recording.shared))]

    def node_of(argument: Any) -> Any:
        if isinstance(argument, Value):
            return nodes[argument.number]
        if isinstance(argument, Number):
            return graph.call_function(operator.getitem, (numbers, argument.place))
        if isinstance(argument, Shared):
            return shared[argument.place]
        return list(argument) if isinstance(argument, tuple) else argument

    for operation in recording.operations:
        arguments = tuple(map(node_of, operation.arguments))
        named = {name: node_of(argument) for name, argument in operation.named}
        copy = _COPIES.get(operation.call)
        if copy is None:
            made = graph.call_function(operation.call, arguments, named)
        else:
            one = graph.call_function(operator.getitem, (numbers, len(recording.numbers)))
            made = graph.call_function(copy, (*arguments[: 2 if copy is _copy_ else 1], one))
        if operation.made is not None:
            nodes[operation.made] = made
    graph.output([nodes[value.number] for value in recording.results.values()])
    return torch.fx.GraphModule(torch.nn.Module(), graph)
