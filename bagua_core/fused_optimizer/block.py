"""One block: how its members' parameters, gradients and states lie in memory, and how the results of a step come back
to the members.

The optimizer works on `flats`, tensors over the members' own memory: one flat for several members, or several for one
that is cut. Each member's state stays what the optimizer's `state` holds for it, its tensors views of the block's
memory; what all share (a count of steps) is kept once per flat and written home to each member's own copy after a step.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from bagua_core.fused_optimizer.flat_memory import (
    Gathered,
    cut,
    flat_of,
    is_like,
    lying_in_order,
    may_move,
    viewed,
)
from bagua_core.fused_optimizer.state_layout import NotBlockwise, is_elementwise, is_plain, is_scalar_tensor

State = dict[Any, Any]
_grad_of: Any = operator.attrgetter("grad")
_layout_of: Any = operator.attrgetter("layout")
_dtype_of: Any = operator.attrgetter("dtype")


class Gradients(Enum):
    """The presence of a block's gradients, as plain memory of the parameters' dtype."""

    ALL = auto()
    NONE = auto()
    SOME = auto()
    NOT_WORTH_COPYING = auto()  # all; but to copy them costs as much as a step that has no states


@dataclass(slots=True)
class _Kept:
    """Gradients that the script keeps from step to step, which lie in order.

    pointers: their addresses; flat: over all of them.
    """

    gradients: list[Tensor]
    pointers: list[int]
    flat: Tensor

    def still_holds(self, gradients: list[Tensor]) -> bool:
        return (
            all(map(operator.is_, gradients, self.gradients))
            and list(map(Tensor.data_ptr, gradients)) == self.pointers
        )


def _presence(gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Gradients:
    absent = list(map(operator.is_, gradients, repeat(None)))
    if any(absent):
        return Gradients.NONE if all(absent) else Gradients.SOME
    plain = set(map(_layout_of, gradients)) == {torch.strided} and set(map(_dtype_of, gradients)) == {dtype}
    return Gradients.ALL if plain else Gradients.SOME


@dataclass(eq=False)
class Block:
    """Parameters on which the optimizer steps together.

    members: the parameters. homes: the optimizer's state of each. kind: of the state, see state_layout.
    moves: whether gradients that the script keeps may be given other memory.
    wholes: by name, [elements] of a state. vectors: by name, [members] of what they share, each member's own copy.
    """

    members: list[Tensor]
    homes: list[State]
    whole: Tensor
    pieces: tuple[int, ...]
    kind: Hashable
    moves: InitVar[bool] = True
    wholes: dict[Any, Tensor] = field(default_factory=dict)
    vectors: dict[Any, Tensor] = field(default_factory=dict)

    def __post_init__(self, moves: bool) -> None:
        self._moves = moves
        self.flats = [torch.nn.Parameter(piece) for piece in cut(self.whole, self.pieces)]
        self.states: list[State] = [{} for _ in self.flats]
        self.pointers = [m.data_ptr() for m in self.members]
        self._begins = _begins(self.members)
        self._byte_offsets = [b * self.whole.element_size() for b in self._begins]
        self.has_stepped = False
        self.copied = False  # whether gradients had to be, in any step
        self._gathered: Gathered | None = None  # gradients that lie anywhere
        self._kept: _Kept | None = None
        self._seen: weakref.ref[Tensor] | None = None  # the first member's gradient, in the step before
        self._taken: weakref.ref[Tensor] | None = None  # likewise, in the last step that it took part in
        self.gradients_stay: bool | None = None  # whether they were the same ones then, if there was one
        self.copies_what_stays = False  # they could not be given memory in order
        self._versions: list[tuple[Tensor, int]] = []
        self._pack()

    # -- states

    def _pack(self) -> None:
        """Brings together the states that the members have already.

        They are of an equal kind, so the first one's names are all of them.
        """
        for name, value in list(self.homes[0].items()):
            if is_elementwise(value, self.members[0]):
                self._take_whole(name, self._together(name))
            elif isinstance(value, Tensor):
                self._share(name, value)
                for state in self.states:
                    state[name] = value.detach().clone()
            else:
                for state in self.states:
                    state[name] = value
        self.note_versions()

    def _together(self, name: Any) -> Tensor:
        """Returns a state of all members as [elements]: their own memory if it is in order."""
        held: list[Tensor] = [home[name] for home in self.homes]
        alike = all(is_like(t, m) for t, m in zip(held, self.members, strict=True))
        if alike and (lying := lying_in_order(held)) is not None:
            return lying
        whole = torch.empty(self.whole.numel(), dtype=held[0].dtype, device=held[0].device)
        for tensor, begin, member in zip(held, self._begins, self.members, strict=True):
            viewed(whole, begin, member).copy_(tensor)
        return whole

    def _take_whole(self, name: Any, whole: Tensor) -> None:
        """Makes this memory the members' state `name` from now on."""
        self.wholes[name] = whole
        for state, piece in zip(self.states, cut(whole, self.pieces), strict=True):
            state[name] = piece
        for home, begin, member in zip(self.homes, self._begins, self.members, strict=True):
            held = home.get(name)
            view = viewed(whole, begin, member)
            if not (isinstance(held, Tensor) and held.data_ptr() == view.data_ptr() and is_like(held, view)):
                home[name] = view

    def _share(self, name: Any, value: Tensor) -> None:
        vector = value.detach().repeat(len(self.members))
        self.vectors[name] = vector
        for home, own in zip(self.homes, torch.unbind(vector), strict=True):
            home[name] = own

    def note_versions(self) -> None:
        """Records that what the members share is as it should be now."""
        self._versions = [(vector, vector._version) for vector in self.vectors.values()]

    @property
    def is_stateless(self) -> bool:
        """Whether the optimizer keeps nothing for its members, so that a step reads each gradient once and does little
        else."""
        return self.has_stepped and not self.homes[0]

    @property
    def is_untouched(self) -> bool:
        """Whether only this block has written to what the members share. (Any code may write to their elements.)"""
        return all(vector._version == version for vector, version in self._versions)

    # -- gradients

    def take_gradients(self) -> Gradients:
        """Gives the flats the members' gradients: as they lie if they lie in order, else copied."""
        gradients = list(map(_grad_of, self.members))
        kept = self._kept
        if kept is None or not kept.still_holds(gradients):
            self._kept = None
            if self.is_better_left():
                return Gradients.NOT_WORTH_COPYING
            presence = _presence(gradients, self.whole.dtype)
            if presence is not Gradients.ALL:
                return presence
            kept = self._kept_by_script(gradients)
        self.gradients_stay = None if self._taken is None else self._taken() is gradients[0]
        self._taken = weakref.ref(gradients[0])
        self.copies_what_stays = bool(self.gradients_stay) and kept is None and len(gradients) > 1
        whole = self._flat_gradient(gradients) if kept is None else kept.flat
        for flat, piece in zip(self.flats, cut(whole, self.pieces), strict=True):
            flat.grad = piece
        return Gradients.ALL

    def is_better_left(self) -> bool:
        """Tells whether the gradients would have to be copied for a step without states: that costs as much as the
        step.

        They are not those of the step before, nor in a bucket, by a look at the first two.
        """
        if len(self.members) == 1 or not self.is_stateless:
            return False
        first, second = self.members[0].grad, self.members[1].grad
        if first is None or second is None or (self._seen is not None and self._seen() is first):
            return False
        if first.layout is not torch.strided or second.layout is not torch.strided:
            return False  # these lie nowhere
        self._seen = weakref.ref(first)
        return second.data_ptr() - first.data_ptr() != self._byte_offsets[1]

    def _flat_gradient(self, gradients: list[Tensor]) -> Tensor:
        """Returns [elements] of gradients that are new in each step, as after zero_grad(set_to_none=True)."""
        if len(gradients) == 1 and is_like(gradients[0], self.members[0]):
            return flat_of(gradients[0])
        self.copied = True
        if self._gathered is None:
            flat = torch.empty_like(self.whole)
            self._gathered = Gathered(flat, self._views_of(flat))
        return self._gathered.gather(gradients)

    def _kept_by_script(self, gradients: list[Tensor]) -> _Kept | None:
        """Returns the gradients if the script keeps them in order, so that they need no copy; else None.

        A script keeps them in buckets, or by zero_grad(set_to_none=False).
        """
        if len(gradients) == 1:
            return None
        begin, second = gradients[0].data_ptr(), gradients[1].data_ptr()
        alike = (
            second - begin == self._byte_offsets[1]  # a look that tells most of those that lie anywhere
            and [g.data_ptr() - begin for g in gradients] == self._byte_offsets
            and all(map(is_like, gradients, self.members))
        )
        flat = lying_in_order(gradients) if alike else None
        seen, self._seen = self._seen, weakref.ref(gradients[0])
        if flat is None and seen is not None and seen() is gradients[0]:
            flat = self._brought_together(gradients)
        if flat is not None:
            self._kept = _Kept(gradients, [g.data_ptr() for g in gradients], flat)
        return self._kept

    def _brought_together(self, gradients: list[Tensor]) -> Tensor | None:
        """Gives kept gradients memory in which they lie in order, if nothing but they looks at the memory they have."""
        if not self._moves or not all(map(may_move, gradients)):
            return None
        flat = torch.empty_like(self.whole)
        for gradient, view in zip(gradients, self._views_of(flat), strict=True):
            view.copy_(gradient)
            gradient.data = view
        self._gathered = None
        return flat

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        return [viewed(flat, b, m) for b, m in zip(self._begins, self.members, strict=True)]

    def forget_gradients(self, are_written: bool = False) -> None:
        """Lets go of the script's gradients, which must not live longer for having been looked at.

        What a step writes to them comes back; are_written: it did so in a way that tensors do not notice.
        """
        if self._gathered is not None:
            self._gathered.give_back(are_written)
        for flat in self.flats:
            flat.grad = None

    # -- after a step

    def take_states(self, by_flat: Mapping[Tensor, State]) -> bool:
        """Takes the states that the optimizer began for flats that had none.

        Returns whether the optimizer began any, even if it left them empty.
        """
        if self.states[0] or self.flats[0] not in by_flat:
            return False
        self.states = [by_flat[flat] for flat in self.flats]
        return True

    def bring_home(self) -> bool:
        """Makes what the optimizer wrote to its flats and their states the members'.

        Returns whether that put another object into a member's state. Raises NotBlockwise.
        """
        for flat, piece in zip(self.flats, cut(self.whole, self.pieces), strict=True):
            if flat.data_ptr() != piece.data_ptr():  # it was given new memory, by `p.data = ...`
                piece.copy_(flat.detach())
                flat.data = piece
        self.has_stepped = True
        first, changed = self.states[0], False
        for name, value in first.items():
            if name in self.wholes and isinstance(value, Tensor) and self._keep_memory(name):
                continue
            if name in self.vectors and is_scalar_tensor(value):
                self.vectors[name].copy_(value.detach())
            elif isinstance(value, Tensor) or self.homes[0].get(name, self) is not value:
                self._adopt(name, value)
                changed = True
        if len(first) != len(self.homes[0]):
            changed = True
            for home in self.homes:
                for name in [n for n in home if n not in first]:
                    del home[name]
        self.note_versions()
        return changed

    def _keep_memory(self, name: Any) -> bool:
        """Copies a state that the optimizer replaced into the memory that the members look at.

        Returns False if it cannot be.
        """
        for state, piece in zip(self.states, cut(self.wholes[name], self.pieces), strict=True):
            value = state[name]
            if value.data_ptr() != piece.data_ptr() or value.dtype != piece.dtype:
                if value.dtype != piece.dtype or value.shape != piece.shape:
                    return False
                piece.copy_(value.detach())
                state[name] = piece
        return True

    def _adopt(self, name: Any, value: Any) -> None:
        """Takes over a state that was not there before, or that is of another sort."""
        if isinstance(value, Tensor):
            if is_scalar_tensor(value):
                self._share(name, value)
                return
            held = [state[name] for state in self.states]
            if any(not is_elementwise(v, f) for v, f in zip(held, self.flats, strict=True)):
                raise NotBlockwise(
                    f"the step left a state {name!r} of shape {tuple(value.shape)} for {self.flats[0].numel()} elements"
                )
            self._take_whole(name, held[0].detach() if len(held) == 1 else torch.cat(held))
            return
        if not is_plain(value):
            raise NotBlockwise(f"the step left a state {name!r} that is a {type(value).__name__}")
        self.wholes.pop(name, None)
        self.vectors.pop(name, None)
        for home in self.homes:
            home[name] = value

    def take_shared(self, state: State) -> None:
        """Gives the flats the values that the members share, from the state of a parameter that stands for them."""
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_scalar_tensor(value):
                continue
            for own in self.states:
                own[name] = value.detach().clone() if isinstance(value, Tensor) else value


def flatten(members: Sequence[Tensor]) -> Tensor:
    """Returns [elements] holding the members' values, which are views of it from now on.

    They stay where they lay if that was in order.
    """
    lying = lying_in_order(members)
    if lying is not None:
        return lying
    whole = torch.empty(sum(m.numel() for m in members), dtype=members[0].dtype, device=members[0].device)
    with torch.no_grad():
        for member, begin in zip(members, _begins(members), strict=True):
            view = viewed(whole, begin, member)
            view.copy_(member)
            member.data = view
    return whole


def _begins(members: Sequence[Tensor]) -> list[int]:
    begins, at = [], 0
    for member in members:
        begins.append(at)
        at += member.numel()
    return begins
