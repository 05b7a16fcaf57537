"""Decides what the optimizer steps on now, blocks or parameters as they are, and tells whether that still holds.

Owns the blocks of one optimizer. `lay_out` decides anew, from where parameters, gradients and states lie at that
moment; what has not moved since is not copied.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bagua_core.fused_optimizer.block import Block, flatten
from bagua_core.fused_optimizer.block_plan import BlockSizes, Candidate, plan_blocks, sizes_for
from bagua_core.fused_optimizer.flat_memory import lying_in_order, may_move, own_memory
from bagua_core.fused_optimizer.state_layout import (
    NotBlockwise,
    kind_of_state,
    reads_attributes,
    why_not_in_a_block,
)


class Moved:
    """Remembers the parameters that were given memory of a block.

    What else lies in that memory is no reason to leave them there.
    """

    def __init__(self) -> None:
        self._memory: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of Tensor to (address, bytes)

    def note(self, parameter: Tensor) -> None:
        self._memory[parameter] = self._name(parameter)

    def may_move(self, parameter: Tensor) -> bool:
        known: Any = self._memory.get(parameter)  # type: ignore[no-untyped-call]
        return bool(known == self._name(parameter)) or may_move(parameter)

    def undo(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        """Gives the parameter and its state memories of their own, if they lie in a block's: see own_memory."""
        if self._memory.get(parameter) != self._name(parameter):  # type: ignore[no-untyped-call]
            return
        parameter.data = own_memory(parameter.data)
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = own_memory(value)

    @staticmethod
    def _name(parameter: Tensor) -> tuple[int, int]:
        memory = parameter.untyped_storage()
        return memory.data_ptr(), memory.nbytes()


class Layout:
    """The blocks and the single parameters that an optimizer steps on.

    groups: for each of the optimizer's, its blocks and the parameters that it steps on as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[list[Block | Tensor]]) -> None:
        self.groups = groups
        self.blocks = [item for group in groups for item in group if isinstance(item, Block)]
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._members = [m for block in self.blocks for m in block.members]
        self._pointers = [pointer for block in self.blocks for pointer in block.pointers]
        self._reads_attributes = reads_attributes(optimizer)
        self._attributes = self._counted_attributes()
        self.note_states(optimizer)

    def note_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Records the states as they are now: they fit the blocks."""
        self._state: Any = optimizer.state
        self._entries: list[Any] = list(self._state.values())
        self._homes = [home for block in self.blocks for home in block.homes]
        self._values = list(chain.from_iterable(map(dict.values, self._homes)))

    def _counted_attributes(self) -> list[int]:
        """Returns the number of attributes of each member, if the step may read them."""
        return list(map(len, map(vars, self._members))) if self._reads_attributes else []

    def why_stale(self, optimizer: torch.optim.Optimizer, looks_at_memory: bool) -> str | None:
        """Returns what changed behind the blocks; None if nothing did."""
        groups = optimizer.param_groups
        if len(groups) != len(self._parameters) or not all(
            len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
            for group, known in zip(groups, self._parameters, strict=True)
        ):
            return "parameters were added or exchanged"
        if looks_at_memory and list(map(Tensor.data_ptr, self._members)) != self._pointers:
            return "parameters were given other memory"
        if self._counted_attributes() != self._attributes:
            return "attributes were set on parameters"
        if (
            optimizer.state is not self._state
            or len(self._state) != len(self._entries)
            or not all(map(operator.is_, self._state.values(), self._entries))
            or sum(map(len, self._homes)) != len(self._values)
            or not all(map(operator.is_, chain.from_iterable(map(dict.values, self._homes)), self._values))
        ):
            return "a state was exchanged"
        if not all(block.is_untouched for block in self.blocks):
            return "a state was written to"
        return None


def lay_out(
    optimizer: torch.optim.Optimizer,
    fusable: Sequence[bool],
    moved: Moved,
    *,
    moves: bool,
    compiled: bool = False,
    cuts: bool = True,
    cuts_states: bool = True,
    gradients_stay: bool = False,
    sizes: BlockSizes | None = None,
) -> Layout:
    """Lays the optimizer's parameters out anew.

    fusable: for each group, whether its parameters may share blocks. moves: whether parameters may be given other
    memory. compiled: whether the step on the blocks is. cuts, cuts_states: whether large ones are cut, without states
    and with. gradients_stay: whether the script keeps them from step to step. sizes: those of the device if None.
    """
    usual = functools.partial(sizes_for, compiled=compiled, gradients_stay=gradients_stay)
    groups: list[list[Block | Tensor]] = []
    for group, may in zip(optimizer.param_groups, fusable, strict=True):
        parameters: list[Tensor] = group["params"]
        blocks = (
            _blocks(optimizer, parameters, moved, moves, (cuts, cuts_states), sizes, usual) if may else []
        )
        taken = {id(m) for block in blocks for m in block.members}
        groups.append([*blocks, *(p for p in parameters if id(p) not in taken)])
    return Layout(optimizer, groups)


def _blocks(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    moved: Moved,
    moves: bool,
    cuts: tuple[bool, bool],
    sizes: BlockSizes | None,
    usual: Callable[[torch.device], BlockSizes],
) -> list[Block]:
    candidates = []
    reads = reads_attributes(optimizer)
    for place, parameter in enumerate(parameters):
        if not parameter.requires_grad or why_not_in_a_block(parameter, reads_attributes=reads) is not None:
            continue
        try:
            state = kind_of_state(parameter, optimizer.state.get(parameter, {}))
        except NotBlockwise:
            continue
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            moved.undo(parameter, optimizer.state.get(parameter, {}))
            continue
        its_sizes = sizes or usual(parameter.device)
        if not cuts[state != ()]:
            its_sizes = replace(its_sizes, cut_above=max(its_sizes.cut_above, parameter.numel()))
        candidates.append(
            Candidate(
                place,
                parameter.numel(),
                (parameter.dtype, parameter.device, state, gradient is not None),
                its_sizes,
                None if gradient is None else _memory(gradient),
            )
        )
    kinds = {c.place: c.kind for c in candidates}
    blocks = []
    for plan in plan_blocks(candidates):
        members = [parameters[place] for place in plan.places]
        if lying_in_order(members) is None:
            members = [m for m in members if moves and moved.may_move(m)]
            if len(members) < len(plan.places) and (len(members) < 2 or len(plan.pieces) > 1):
                continue
            whole = flatten(members)
            for member in members:
                moved.note(member)
        else:
            whole = flatten(members)
        homes = [optimizer.state.get(m, {}) for m in members]
        pieces = plan.pieces if len(plan.pieces) > 1 else (whole.numel(),)
        blocks.append(Block(members, homes, whole, pieces, kinds[plan.places[0]], moves))
    return blocks


def _memory(gradient: Tensor) -> tuple[int, int] | None:
    if gradient.layout is not torch.strided:
        return None
    return gradient.untyped_storage().data_ptr(), int(gradient.storage_offset())
