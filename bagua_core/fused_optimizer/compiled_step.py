"""Runs the optimizer's step on blocks as torch.compile compiles it, for compile=True.

A carrier is an optimizer of the script's class with one flat parameter. torch.compile compiles its step once, for
tensors of any size, and the carrier's tensors are given the memory of one block after the other. Blocks that are alike
have a representative of some random elements: the optimizer's own step runs on it and gives what the members share.
Each time torch.compile has compiled something, the carrier's step is compared with the optimizer's own step on these
elements before it runs on a block.
"""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bagua_core.errors import BaguaError
from bagua_core.fused_optimizer.block import Block, State
from bagua_core.fused_optimizer.block_optimizer import OF_THE_SCRIPT, BlockOptimizer, plain_step
from bagua_core.optimizers.closures import Evaluated

ELEMENTS = 4099  # of a representative: no multiple of a vector's length
# Of what the step gives. Where a rounding decides (by a sign, or where two numbers all but cancel out) elements may be
# anything, and such are few.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
_MOST_FAR = 0.05  # share of elements


class NotCompilable(BaguaError, ValueError):
    """The step cannot run compiled; the message says why."""


def why_no_compiler(device: torch.device) -> str | None:
    """Returns why torch.compile cannot build code for `device`; None if it can. On the CPU it calls $CXX, by default
    g++."""
    command = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    if device.type == "cpu" and shutil.which(command) is None:
        return f"there is no C++ compiler {command} on PATH; install g++ or set CXX"
    return None


def close(expected: Tensor, got: Tensor) -> bool:
    """Tells whether the tensors are equal within rounding, but for few elements.

    fp16 has so small a range that most random elements leave it, so any two tensors of it count as close.
    """
    rounding = _ROUNDING.get(expected.dtype)
    if rounding is None:
        return True
    near = torch.isclose(got.detach(), expected.detach(), rtol=rounding, atol=0.0, equal_nan=True)
    return float((~near).float().mean()) <= _MOST_FAR


def _called_again() -> NoReturn:
    raise NotCompilable("it calls its closure several times a step")


@dataclass(eq=False)
class _Representative:
    """A parameter of some random elements that stands for blocks that are alike.

    state: what the optimizer's own step has made of it, once it has run.
    """

    group: int
    parameter: torch.nn.Parameter
    state: State
    carrier: _Carrier
    blocks: list[Block] = field(default_factory=list)


class CompiledStep:
    """Runs an optimizer's step on blocks, compiled.

    compilations: how often torch.compile has compiled a step of this optimizer.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self._checked = 0  # compilations whose results were compared
        self._carriers: dict[Hashable, _Carrier] = {}
        self._representatives: dict[Hashable, _Representative] = {}
        # options, attributes and shared state at the beginning of this step
        self._before: BlockOptimizer | None = None
        self._loss: Any = None
        self._refusal = ""  # why the last graph was not compiled

    def begin(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """Prepares a step. loss: of the closure, None without one."""
        self._representatives = {}
        self._before = BlockOptimizer(optimizer)
        _copy_in_place(self._before)
        self._loss = loss

    def expect(self, block_optimizer: BlockOptimizer, group: int, block: Block) -> None:
        """Adds `block`, whose gradients are gathered, to this step."""
        # torch.compile has code of its own for a single element
        elements = min(ELEMENTS, block.whole.numel())
        key = group, block.kind, elements == 1
        one = self._representatives.get(key)
        if one is None:
            parameter, state = _random_one(block, elements)
            carrier = self._carrier(block, elements == 1)
            one = self._representatives[key] = _Representative(group, parameter, state, carrier)
            block_optimizer.add(group, parameter, state)
        one.blocks.append(block)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Compiles what this step needs, and compares what is new with the optimizer's own step.

        Changes neither the optimizer nor its blocks. Raises NotCompilable.
        """
        if any(one.parameter.is_complex() for one in self._representatives.values()):
            raise NotCompilable("it computes in complex numbers")
        block_optimizer = BlockOptimizer(optimizer)
        _copy_in_place(block_optimizer)
        found = []
        for one in self._representatives.values():
            expected, got = (_copied_one(one.parameter, one.state) for _ in range(2))
            block_optimizer.add(one.group, *expected)
            try:
                replaced = self._run(one, got[0], got[0].grad, got[1])
            except NotCompilable:
                raise
            except Exception as error:  # any of the errors that torch.compile raises
                reason = self._refusal or f"torch.compile fails on it: {_first_line(error)}"
                raise NotCompilable(reason) from error
            found.append((expected, (got[0], {**got[1], **replaced})))
        if self.compilations == self._checked:
            return
        arguments = () if self._loss is None else (Evaluated(_called_again, self._loss),)
        try:
            plain_step(type(optimizer))(block_optimizer.optimizer, *arguments)
        except NotCompilable:
            raise
        except Exception as error:  # of an optimizer that refuses random elements
            raise NotCompilable(f"{type(error).__name__} on random elements: {error}") from error
        for (parameter, state), (other, other_state) in found:
            pairs = [(parameter, other), (parameter.grad, other.grad)]
            pairs += [
                (value, other_state.get(name)) for name, value in state.items() if is_elementwise(value)
            ]
            if not all(b is not None and a is not None and close(a, b) for a, b in pairs):
                raise NotCompilable("compiled, it gives other results")
        self._checked = self.compilations

    def run(self, stepped: Sequence[Block]) -> None:
        """Runs the step on the blocks' elements, and gives them what they share as their representative has it now."""
        going = set(stepped)
        for one in self._representatives.values():
            for block in one.blocks:
                if block not in going:
                    continue
                state = block.states[0]
                replaced = self._run(one, block.whole, block.flats[0].grad, state)
                block.take_shared(one.state)
                state.update(replaced)
        self._representatives, self._before, self._loss = {}, None, None

    def _run(self, one: _Representative, parameter: Tensor, gradient: Tensor | None, state: State) -> State:
        assert self._before is not None
        return one.carrier.step(self._before.optimizer, one.group, parameter, gradient, state, self._loss)

    def _carrier(self, block: Block, is_single: bool) -> _Carrier:
        assert self._before is not None
        whole, state = block.whole, block.states[0]
        kinds = tuple((n, v.dtype if isinstance(v, Tensor) else type(v)) for n, v in state.items())
        key = whole.dtype, whole.device, kinds, is_single
        if key not in self._carriers:
            self._carriers[key] = _Carrier(self._before.optimizer, whole, self._compile)
        return self._carriers[key]

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx  # takes a second to import

        self.compilations += 1
        self._refusal = _why_not_elementwise(graph)
        if self._refusal:
            raise NotCompilable(self._refusal)
        return compile_fx(graph, inputs)


class _Carrier:
    """An optimizer of the script's class with one flat parameter.

    The tensors that the compiled code is bound to stay the same objects; their memory is exchanged.
    """

    def __init__(self, script: torch.optim.Optimizer, like: Tensor, backend: Callable[..., Any]) -> None:
        self.parameter = torch.empty_like(
            like[:1]
        ).requires_grad_()  # no Parameter: those are compiled for one size
        self.optimizer = BlockOptimizer(script).optimizer
        self.optimizer.param_groups = [{}]
        self._tensors: State = {}  # elementwise ones
        self._scalars: dict[Hashable, Tensor] = {}  # others, and numbers that change
        self._numbers: dict[Hashable, float] = {}  # of the first step
        self._state: State = {}
        self.optimizer.state[self.parameter] = self._state
        self._loss: Any = None
        step = plain_step(type(script))

        def call() -> None:
            if self._loss is None:
                step(self.optimizer)
            else:
                step(self.optimizer, lambda: self._loss)

        # torch limits how often one code object is compiled, and each carrier needs compilations of its own
        own = types.FunctionType(call.__code__.replace(), globals(), "step", None, call.__closure__)
        self._call = torch.compile(own, fullgraph=True, dynamic=True, backend=backend)

    def step(
        self,
        script: Any,
        group: int,
        parameter: Tensor,
        gradient: Tensor | None,
        state: State,
        loss: Any,
    ) -> State:
        """Steps in the memory of `parameter`, `gradient` and the elementwise tensors of `state`.

        script: the optimizer whose options and attributes count; not changed. Returns states that the step replaced by
        other tensors.
        """
        optimizer, options = self.optimizer, self.optimizer.param_groups[0]
        attributes = vars(optimizer)
        for name, value in vars(script).items():
            if name not in OF_THE_SCRIPT:
                self._put(attributes, "attribute", name, value)
        for name, value in script.state.items():
            self._put(optimizer.state, "shared", name, value)
        for name, value in script.param_groups[group].items():
            if name != "params":
                self._put(options, "option", name, value)
        options["params"] = [self.parameter]
        self.parameter.data = parameter.detach()
        self.parameter.grad = gradient
        self._state.clear()
        for name, value in state.items():
            if is_elementwise(value):
                self._state[name] = self._tensors.setdefault(name, value.detach())
                self._state[name].data = value.detach()
            else:
                self._put(self._state, "state", name, value)
        self._loss = loss
        self._call()
        if self.parameter.data_ptr() != parameter.data_ptr():
            raise NotCompilable("it gives parameters new memory")
        if list(self._state) != list(state):
            raise NotCompilable("it changes which states it keeps")
        replaced = {
            name: value
            for name, value in self._state.items()
            if is_elementwise(value) and value is not self._tensors[name]
        }
        self.parameter.grad = None
        for tensor in (self.parameter, *self._tensors.values()):
            tensor.data = tensor.new_empty(0)  # memory that something else uses is not moved, see may_move
        return replaced

    def _put(self, holder: dict[Any, Any], where: str, name: Any, value: Any) -> None:
        """Puts a copy of `value` into `holder`.

        A number that has changed since the first step becomes a tensor, as torch.compile would compile the step anew
        for each number.
        """
        key = where, name
        if type(value) in (int, float):
            if key not in self._numbers:
                self._numbers[key] = value
            if key not in self._scalars and self._numbers[key] != value:
                self._scalars[key] = torch.zeros((), dtype=torch.float64, device="cpu")
            if key in self._scalars:
                holder[name] = self._scalars[key].fill_(value)
                return
        elif isinstance(value, Tensor):
            held = self._scalars.setdefault(key, value.detach().clone().to(self.parameter.device))
            if held.dtype == value.dtype and held.shape == value.shape:
                holder[name] = held.copy_(value)
                return
        holder[name] = _copied(value)


def _why_not_elementwise(graph: torch.fx.GraphModule) -> str:
    """Returns why the graph does not work on each element by itself; empty if it does.

    A value made of many elements, as a norm over all parameters, would be another one for each block.
    """

    def tensors(nodes: Iterable[torch.fx.Node]) -> list[Tensor]:
        values = tree_leaves([node.meta.get("example_value") for node in nodes])
        return [value for value in values if isinstance(value, Tensor)]

    for node in graph.graph.nodes:
        if any(v.dim() for v in tensors(node.all_input_nodes)) and any(not v.dim() for v in tensors([node])):
            return f"{node.target} makes one value of many elements"
    return ""


def is_elementwise(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _random_one(block: Block, elements: int) -> tuple[torch.nn.Parameter, State]:
    """Returns a parameter with a gradient, of all magnitudes, in a state that shares what the block's does.

    No state is negative, because some must not be.
    """
    generator = torch.Generator().manual_seed(len(block.states[0]))

    def drawn(dtype: torch.dtype) -> Tensor:
        values = torch.randn(elements, generator=generator, dtype=torch.float32, device="cpu")
        return (values * 10.0 ** torch.empty_like(values).uniform_(-6, 2, generator=generator)).to(dtype)

    parameter = torch.nn.Parameter(drawn(block.whole.dtype).to(block.whole.device))
    parameter.grad = drawn(block.whole.dtype).to(block.whole.device)
    parameter.grad[::17] = 0.0
    own: State = {}
    for name, value in block.states[0].items():
        if is_elementwise(value):
            own[name] = drawn(value.dtype).abs().to(value.device, value.dtype)
        else:
            own[name] = _copied(value)
    return parameter, own


def _copied_one(parameter: Tensor, state: State) -> tuple[Tensor, State]:
    made = torch.nn.Parameter(parameter.detach().clone())
    made.grad = None if parameter.grad is None else parameter.grad.clone()
    return made, {name: _copied(value) for name, value in state.items()}


def _copy_in_place(block_optimizer: BlockOptimizer) -> None:
    """Copies what the block optimizer holds: what is changed in place there must not be the script's."""
    attributes = vars(block_optimizer.optimizer)
    for name, value in attributes.items():
        if name not in OF_THE_SCRIPT:
            attributes[name] = _copied(value)
    for name, value in block_optimizer.optimizer.state.items():
        block_optimizer.optimizer.state[name] = _copied(value)
    for group in block_optimizer.optimizer.param_groups:
        group.update({name: _copied(value) for name, value in group.items() if name != "params"})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
