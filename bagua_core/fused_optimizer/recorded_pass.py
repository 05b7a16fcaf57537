"""How is a step run over whole blocks in one pass, whatever the optimizer?

Blocks that are alike have one representative of a few elements, on which the optimizer's own step runs; what it did
there is made into a program once, and run on each block with the numbers of this step. So a learning rate that changes
makes no new program. Owns the representatives and the programs; what a program is made by is for others to say
(compiled_program.py, library_program.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bagua_core.fused_optimizer.block import Block, State
from bagua_core.fused_optimizer.block_sizes import Way
from bagua_core.fused_optimizer.options import switches
from bagua_core.fused_optimizer.recording import NotRecordable, Recorder, Recording
from bagua_core.fused_optimizer.representatives import (
    detach_from_script,
    is_elementwise,
    random_one,
    small_one,
)
from bagua_core.fused_optimizer.stand_in import StandIn, plain_step

# Options, where an optimizer has them, under which its step works on one tensor after the other.
ONE_BY_ONE = {"foreach": False, "fused": False}
MOST_PROGRAMS = 16  # an optimizer has a handful: the first step, the later ones, each dtype
MOST_TRIED = 1 << 22  # elements: as a compiler's choices go by sizes, and little beside a model
_PARAMETER, _GRADIENT = "parameter", "gradient"


class Program(Protocol):
    def run(self, recording: Recording, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The recorded step on each part's inputs, which are in the recording's order; returns each part's results.

        Raises NotRecordable before it has changed anything."""
        ...


Inputs = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What makes programs of recordings, and when. make(recording, inputs): `inputs` gives copies of what it will run
    on, to be tried on. same: (optimizer, group) -> whether that group's step is the same with ONE_BY_ONE. agrees: (what
    the step gives, what a program gives) on random elements; no program is used that does not. is_asked_for: by the
    script, so that it is told where there is none. takes: whether programs can work on a parameter. least_elements: for
    each group, from which on it is worth what recording a step costs."""

    way: Way
    make: Callable[[Recording, Inputs], Program]
    same: Callable[[torch.optim.Optimizer, int], bool]
    agrees: Callable[[Tensor, Tensor], bool]
    is_asked_for: bool = True
    takes: Callable[[Tensor], bool] = lambda parameter: True
    least_elements: int = 0


Arguments = Callable[[], tuple[Any, ...]]  # of step(), fresh for each call: a closure is called once


@dataclass(eq=False)
class _Representative:
    group: int
    parameter: torch.nn.Parameter
    state: State
    blocks: list[Block] = field(default_factory=list)
    recording: Recording | None = None
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class _Followed:
    """A further representative, on which the step has run and was recorded. stood: its state afterwards."""

    recording: Recording
    parameter: torch.nn.Parameter
    inputs: dict[Any, Tensor]
    stood: State


class RecordedPass:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._known_same: set[Hashable] = set()
        self._representatives: dict[Hashable, _Representative] = {}
        self._programs: dict[Hashable, Program] = {}

    @property
    def programs(self) -> int:
        """How many have been made."""
        return len(self._programs)

    def pays(self, groups: Sequence[Sequence[Tensor]]) -> bool:
        """Whether a step on these groups' parameters is worth recording: that costs as much for each group."""
        kind = self.kind
        elements = sum(p.numel() for group in groups for p in group)
        return elements >= kind.least_elements * len(groups) and all(
            kind.takes(p) for group in groups for p in group
        )

    def begin(self) -> None:
        """A step is being prepared."""
        self._representatives = {}

    def expect(self, stand_in: StandIn, group: int, block: Block) -> None:
        """`block`, whose gradients are gathered, takes part in this step."""
        key = (group, block.kind)
        one = self._representatives.get(key)
        if one is None:
            parameter, state = small_one(block.flats[0], block.states[0])
            one = self._representatives[key] = _Representative(group, parameter, state)
            stand_in.add(group, parameter, state)
        one.blocks.append(block)

    def record(self, optimizer: torch.optim.Optimizer, arguments: Arguments, kwargs: dict[str, Any]) -> bool:
        """Run the step on further representatives and write down what it does; nothing else notices.

        Returns False if it makes states, as the first step does: that is not worth a program. Raises NotRecordable.
        """
        for number in {one.group for one in self._representatives.values()}:
            key = switches(optimizer.param_groups[number])
            if key not in self._known_same:
                if not self.kind.same(optimizer, number):
                    raise NotRecordable("it takes other steps for lists of parameters than for single ones")
                self._known_same.add(key)
        representatives = list(self._representatives.values())
        all_followed = self._follow(optimizer, representatives, small_one, arguments(), kwargs)
        if all_followed is None:
            return False
        unproved = []
        for one, followed in zip(representatives, all_followed, strict=True):
            one.recording = followed.recording
            one.program, is_new = self._program(followed.recording, one.blocks[0])
            if is_new:
                unproved.append(one)
        if unproved:
            self._prove(optimizer, representatives, unproved, arguments(), kwargs)
        return True

    def _follow(
        self,
        optimizer: torch.optim.Optimizer,
        representatives: Sequence[_Representative],
        like: Callable[[Tensor, State], tuple[torch.nn.Parameter, State]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Callable[[list[dict[Any, Tensor]]], None] = lambda inputs: None,
    ) -> list[_Followed] | None:
        """The optimizer's step on representatives made by `like`. None if it makes states. before: told of what it
        begins with. Raises NotRecordable."""
        stand_in = StandIn(optimizer, **ONE_BY_ONE)
        detach_from_script(stand_in)
        recorder = Recorder()
        begun = []
        for one in representatives:
            parameter, state = like(one.blocks[0].flats[0], one.blocks[0].states[0])
            stand_in.add(one.group, parameter, state or None)
            inputs: dict[Any, Tensor] = {_PARAMETER: parameter}
            if parameter.grad is not None:
                inputs[_GRADIENT] = parameter.grad
            inputs.update({("state", n): v for n, v in state.items() if is_elementwise(v)})
            begun.append((recorder.follow(inputs), parameter, parameter.data_ptr(), inputs))
        before([inputs for _, _, _, inputs in begun])
        try:
            with recorder:
                plain_step(type(optimizer))(stand_in.optimizer, *args, **kwargs)
        except NotRecordable:
            raise
        except Exception as error:  # what the step raises, it is about to raise again
            raise NotRecordable(f"{type(error).__name__} while it was recorded: {error}") from error
        found = []
        for one, (recording, parameter, pointer, inputs) in zip(representatives, begun, strict=True):
            if parameter.data_ptr() != pointer:
                raise NotRecordable("it gives parameters new memory")
            stood = stand_in.optimizer.state.get(parameter, {})
            for name, value in stood.items():
                if is_elementwise(value) and inputs.get(("state", name)) is not value:
                    if ("state", name) not in inputs:
                        return None
                    recording.results[name] = recorder.value_of(recording, value)
            if parameter in stand_in.optimizer.state and one.blocks[0].members[0] not in optimizer.state:
                return None  # even an empty one is seen in a state_dict
            found.append(_Followed(recording, parameter, inputs, stood))
        return found

    def _program(self, recording: Recording, like: Block) -> tuple[Program, bool]:
        """And whether it is a new one."""
        key = _key(recording, like)
        try:
            known = self._programs.get(key)
        except TypeError as error:  # an argument that has no hash
            raise NotRecordable(f"an operation has an argument that is no plain value: {error}") from error
        if known is not None:
            return known, False
        if len(self._programs) == MOST_PROGRAMS:
            raise NotRecordable(f"it has been {MOST_PROGRAMS} different programs by now")

        def copies() -> list[Tensor]:
            return [_input(name, like).detach()[:MOST_TRIED].clone() for name in recording.inputs]

        made = self._programs[key] = self.kind.make(recording, copies)
        return made, True

    def _prove(
        self,
        optimizer: torch.optim.Optimizer,
        representatives: Sequence[_Representative],
        unproved: Sequence[_Representative],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """The step on many random elements, and the program on a copy of them, must agree. Raises NotRecordable."""
        copies: list[list[Tensor]] = []

        def copy_all(all_inputs: list[dict[Any, Tensor]]) -> None:
            copies.extend([value.detach().clone() for value in inputs.values()] for inputs in all_inputs)

        all_followed = self._follow(optimizer, representatives, random_one, args, kwargs, copy_all)
        if all_followed is None:
            raise NotRecordable("it makes states by the values of elements")
        for one, own, followed in zip(representatives, copies, all_followed, strict=True):
            if one not in unproved:
                continue
            assert one.program is not None and one.recording is not None
            if followed.recording.structure != one.recording.structure:
                raise NotRecordable("it goes by the values of elements")
            (results,) = one.program.run(followed.recording, [own])
            pairs = [
                (expected, got)
                for (name, expected), got in zip(followed.inputs.items(), own, strict=True)
                if name not in {("state", replaced) for replaced in followed.recording.results}
            ]
            pairs += [
                (followed.stood[n], got) for n, got in zip(followed.recording.results, results, strict=True)
            ]
            if not all(self.kind.agrees(expected, got) for expected, got in pairs):
                raise NotRecordable("its program gives other results than the step")

    def run(self, stepped: Sequence[Block]) -> None:
        """The step, on the blocks' elements; and on what they share, as their representative has it now."""
        going = set(stepped)
        for one in self._representatives.values():
            recording, program = one.recording, one.program
            assert recording is not None and program is not None
            blocks = [block for block in one.blocks if block in going]
            if not blocks:
                continue
            parts = [[_input(name, block) for name in recording.inputs] for block in blocks]
            for block, results in zip(blocks, program.run(recording, parts), strict=True):
                block.take_shared(one.state)
                for name, result in zip(recording.results, results, strict=True):
                    block.states[0][name] = result
        self._representatives = {}


def _key(recording: Recording, like: Block) -> Hashable:
    return recording.structure, like.whole.dtype, like.whole.device


def _input(name: Any, block: Block) -> Tensor:
    if name == _PARAMETER:
        return block.whole
    if name == _GRADIENT:
        gradient = block.flats[0].grad
        assert gradient is not None
        return gradient
    found: Tensor = block.states[0][name[1]]
    return found
