"""How is a step run over whole blocks in one compiled pass, whatever the optimizer?

Blocks that are alike have one representative of a few elements, on which the optimizer's own step runs; what it did
there is compiled once, and run on each block with the numbers of this step. So a learning rate that changes compiles
nothing anew. Owns the representatives and the compiled programs.
"""

from __future__ import annotations

import copy
import os
import shlex
import shutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bagua_core.fused_optimizer.block import Block, State
from bagua_core.fused_optimizer.errors import NoCompilerError
from bagua_core.fused_optimizer.options import switches
from bagua_core.fused_optimizer.recording import NotRecordable, Recorder, Recording, as_graph
from bagua_core.fused_optimizer.stand_in import OF_THE_SCRIPT, StandIn, plain_step

__all__ = ["CompiledPass", "NotRecordable", "require_compiler"]

ELEMENTS = 5  # of a representative; no dimension that something else is likely to have
# Options, where an optimizer has them, under which its step works on one tensor after the other.
ONE_BY_ONE = {"foreach": False, "fused": False}
MOST_PROGRAMS = 16  # an optimizer has a handful: the first step, the later ones, each dtype
_PARAMETER, _GRADIENT = "parameter", "gradient"


def require_compiler(device: torch.device) -> None:
    """Raises NoCompilerError where torch.compile could not build code for `device`. It takes $CXX, else g++."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if device.type == "cpu" and shutil.which(words[0]) is None:
        raise NoCompilerError(
            f"compile=True needs a C++ compiler for parameters on the CPU, and there is no {words[0]} on PATH; "
            "install g++, set CXX, or leave compile=True out"
        )


@dataclass
class _Representative:
    group: int
    parameter: torch.nn.Parameter
    state: State
    blocks: list[Block] = field(default_factory=list)
    recording: Recording | None = None
    program: Callable[..., list[Tensor]] | None = None


class CompiledPass:
    """same_one_by_one(optimizer, group): whether a group's step is the same, but for rounding, with ONE_BY_ONE."""

    def __init__(self, same_one_by_one: Callable[[torch.optim.Optimizer, int], bool]) -> None:
        self._same_one_by_one = same_one_by_one
        self._known_same: set[Hashable] = set()
        self._representatives: dict[Hashable, _Representative] = {}
        self._programs: dict[Hashable, Callable[..., list[Tensor]]] = {}

    @property
    def programs(self) -> int:
        """How many have been compiled."""
        return len(self._programs)

    def begin(self) -> None:
        """A step is being prepared."""
        self._representatives = {}

    def expect(self, stand_in: StandIn, group: int, block: Block) -> None:
        """`block`, whose gradients are gathered, takes part in this step."""
        key = (group, block.kind)
        one = self._representatives.get(key)
        if one is None:
            parameter, state = _small(block.flats[0], block.states[0])
            one = self._representatives[key] = _Representative(group, parameter, state)
            stand_in.add(group, parameter, state)
        one.blocks.append(block)

    def record(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Run the step on further representatives and write down what it does; nothing else notices.

        Returns False if it makes states, as the first step does: that is not worth compiling. Raises NotRecordable.
        """
        for number in {one.group for one in self._representatives.values()}:
            key = switches(optimizer.param_groups[number])
            if key not in self._known_same:
                if not self._same_one_by_one(optimizer, number):
                    raise NotRecordable("it takes other steps for lists of parameters than for single ones")
                self._known_same.add(key)
        stand_in = StandIn(optimizer, **ONE_BY_ONE)
        _detach_from_script(stand_in)
        recorder = Recorder()
        followed = []
        for one in self._representatives.values():
            parameter, state = _small(one.blocks[0].flats[0], one.blocks[0].states[0])
            stand_in.add(one.group, parameter, state)
            inputs: dict[Any, Tensor] = {_PARAMETER: parameter}
            if parameter.grad is not None:
                inputs[_GRADIENT] = parameter.grad
            inputs.update({("state", n): v for n, v in state.items() if _is_elementwise(v)})
            followed.append((one, recorder.follow(inputs), parameter, parameter.data_ptr(), inputs))
        with recorder:
            plain_step(type(optimizer))(stand_in.optimizer, *args, **kwargs)
        for one, recording, parameter, pointer, inputs in followed:
            if parameter.data_ptr() != pointer:
                raise NotRecordable("it gives parameters new memory")
            for name, value in stand_in.optimizer.state[parameter].items():
                if _is_elementwise(value) and inputs.get(("state", name)) is not value:
                    if ("state", name) not in inputs:
                        return False
                    recording.results[name] = recorder.value_of(recording, value)
            one.recording, one.program = recording, self._compiled(recording, one.blocks[0])
        return True

    def _compiled(self, recording: Recording, like: Block) -> Callable[..., list[Tensor]]:
        key = (recording.structure, like.whole.dtype, like.whole.device)
        try:
            known = self._programs.get(key)
        except TypeError as error:  # an argument that has no hash
            raise NotRecordable(f"an operation has an argument that is no plain value: {error}") from error
        if known is None:
            if len(self._programs) == MOST_PROGRAMS:
                raise NotRecordable(f"it has been {MOST_PROGRAMS} different programs by now")
            known = self._programs[key] = torch.compile(
                as_graph(recording).forward, dynamic=True, fullgraph=True
            )
        return known

    def run(self, stepped: Sequence[Block]) -> None:
        """The step, on the blocks' elements; and on what they share, as their representative has it now."""
        going = set(stepped)
        for one in self._representatives.values():
            recording, program = one.recording, one.program
            assert recording is not None and program is not None
            numbers = _as_tensor(
                recording.numbers, one.blocks[0].whole
            )  # blocks of one kind are of one dtype and device
            for block in one.blocks:
                if block not in going:
                    continue
                inputs = [_input(name, block) for name in recording.inputs]
                results = program(*inputs, numbers, *recording.shared)
                block.take_shared(one.state)
                for name, result in zip(recording.results, results, strict=True):
                    block.states[0][name] = result
        self._representatives = {}


def _is_elementwise(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _small(flat: Tensor, state: State) -> tuple[torch.nn.Parameter, State]:
    """A parameter of a few elements with a gradient, in a state that shares what `state` does."""
    parameter = torch.nn.Parameter(torch.full((ELEMENTS,), 0.5, dtype=flat.dtype, device=flat.device))
    parameter.grad = torch.full_like(parameter, 0.25)
    own: State = {}
    for name, value in state.items():
        if _is_elementwise(value):
            own[name] = torch.full((ELEMENTS,), 1, dtype=value.dtype, device=value.device)
        else:
            own[name] = value.detach().clone() if isinstance(value, Tensor) else value
    return parameter, own


def _input(name: Any, block: Block) -> Tensor:
    if name == _PARAMETER:
        return block.whole
    if name == _GRADIENT:
        gradient = block.flats[0].grad
        assert gradient is not None
        return gradient
    found: Tensor = block.states[0][name[1]]
    return found


def _as_tensor(numbers: Sequence[float], like: Tensor) -> Tensor:
    """In the precision in which torch applies a number to elements of that dtype."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True)


def _detach_from_script(stand_in: StandIn) -> None:
    """What a trial run changes in place must not be the script's."""
    attributes = vars(stand_in.optimizer)
    for name, value in attributes.items():
        if name not in OF_THE_SCRIPT:
            attributes[name] = _copied(value)
    for name, value in stand_in.optimizer.state.items():
        stand_in.optimizer.state[name] = _copied(value)
    for group in stand_in.optimizer.param_groups:
        group.update({name: _copied(value) for name, value in group.items() if name != "params"})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value
