"""Makes the optimizer's own step work on blocks, once for each step of the script.

Hooks that torch calls around every step hand the step to a stand-in with blocks for parameters; what is called how
often, by a scheduler, a scaler or the runtime, stays as it was. Owns the layout in force, what is under way, and the
choice of what to do with a block in a step whose gradients are not all there: absent ones must stay as they are, never
count as zero. layout_choice.py decides how to lay out next.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bagua_core.fused_optimizer.block import Block, Gradients
from bagua_core.fused_optimizer.block_optimizer import BlockOptimizer
from bagua_core.fused_optimizer.block_plan import BlockSizes
from bagua_core.fused_optimizer.compiled_step import CompiledStep, NotCompilable
from bagua_core.fused_optimizer.errors import FusedOptimizerError
from bagua_core.fused_optimizer.foreach_step import ForeachStep
from bagua_core.fused_optimizer.layout import Layout, Moved, lay_out
from bagua_core.fused_optimizer.layout_choice import LayoutChoice
from bagua_core.fused_optimizer.options import SwitchWatch
from bagua_core.fused_optimizer.state_layout import NotBlockwise
from bagua_core.optimizers.closures import Evaluated, closure_of

# For each group, may its parameters share blocks?
Fusable = Callable[[torch.optim.Optimizer], Sequence[bool]]


@dataclass
class _UnderWay:
    """The step under way.

    compiled: runs the step on the blocks after the block optimizer has run it on their representatives, if not None.
    """

    block_optimizer: BlockOptimizer
    compiled: CompiledStep | None
    stepped: list[Block] = field(default_factory=list)  # by the block optimizer, or compiled, after it
    loose: list[Tensor] = field(default_factory=list)


class FusedStep:
    """The hooks around an optimizer's step that let it work on blocks.

    moves: whether parameters may be given other memory. looks_at_memory: look, before each step, whether the script has
    moved them since. sizes: of blocks; the device's if None. otherwise: for steps in which blocks are of no use.
    """

    def __init__(
        self,
        fusable: Fusable,
        *,
        moves: bool = True,
        looks_at_memory: bool = True,
        compiled: CompiledStep | None = None,
        sizes: BlockSizes | None = None,
        otherwise: ForeachStep | None = None,
        choice: LayoutChoice | None = None,
    ) -> None:
        self._fusable = fusable
        self._otherwise = otherwise
        self._choice = choice or LayoutChoice()
        self._begun_s: float | None = None
        self._moves = moves
        self._looks_at_memory = looks_at_memory
        self._compiled = compiled
        self._sizes = sizes
        self._moved = Moved()
        self._layout: Layout | None = None
        self._switches = SwitchWatch()
        self._idles = False
        self._is_left = False  # its parameters lie by themselves again
        self._fusable_groups: Sequence[bool] = ()
        self._under_way: _UnderWay | None = None
        self._open: dict[
            Block, tuple[bool, ...]
        ] = {}  # which gradients were there when its members stepped alone

    @property
    def layout(self) -> Layout | None:
        """The layout of the last step, which says what is fused."""
        return self._layout

    @property
    def choice(self) -> LayoutChoice:
        return self._choice

    @property
    def compiled(self) -> CompiledStep | None:
        """The compiled step; None if the step is not to be compiled, or cannot be."""
        return self._compiled

    # -- torch's hooks around a step, and before a state_dict

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepares a step, and returns its arguments with the block optimizer in the optimizer's place.

        args: the optimizer itself first, as torch hands them over. None leaves the step to the optimizer as it is.
        """
        self._begun_s = None
        if torch.compiler.is_compiling():
            return None  # a caller that compiles the step as it is traces the parameters as they are
        self._finish(optimizer)  # a step that raised
        self._judge_switches(optimizer)
        if not any(self._fusable_groups):
            return None
        closure, rest, named = closure_of(args[1:], kwargs)
        if closure is None and self._is_idle():
            if self._otherwise is not None:
                self._otherwise.begin(optimizer, self._switches.found)
            return None
        compiled, loss = None if rest or named else self._compiled, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            rest = (Evaluated(closure, loss, lambda: self._gradients_again(optimizer)), *rest)
        begun_s = time.perf_counter()
        with torch.no_grad():
            under_way = self._prepare(optimizer, compiled, loss)
            if under_way is not None and under_way.compiled is not None and not self._check(optimizer):
                under_way = self._prepare(optimizer, None)
        if self._compiled is None:
            self._begun_s = begun_s
        self._under_way = under_way
        return (optimizer if under_way is None else under_way.block_optimizer.optimizer, *rest), named

    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stepped = [] if self._under_way is None else self._under_way.stepped
        self._finish(optimizer)
        begun_s = self._begun_s
        if (
            begun_s is not None
            and self._layout is not None
            and self._choice.took(time.perf_counter() - begun_s, stepped)
        ):
            self._layout = None

    def before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """Resets what a step that raised has left in options, which must not be kept."""
        if self._otherwise is not None:
            self._otherwise.end()

    # -- before

    def _prepare(
        self, optimizer: torch.optim.Optimizer, compiled: CompiledStep | None, loss: Any = None
    ) -> _UnderWay | None:
        """Prepares the block optimizer; returns None if there is nothing that blocks could be used for in this step."""
        layout = self._laid_out(optimizer)
        found = {block: self._gradients_of(optimizer, block) for block in layout.blocks}
        self._idles = bool(found) and set(found.values()) == {Gradients.NOT_WORTH_COPYING}
        if self._idles:
            self._leave(optimizer, layout)
        if Gradients.ALL not in found.values():
            return None
        if not all(block.has_stepped for block, its in found.items() if its is Gradients.ALL):
            compiled = None  # a step that makes states happens once, and is not worth compiling
        under_way = _UnderWay(BlockOptimizer(optimizer), compiled)
        if compiled is not None:
            compiled.begin(optimizer, loss)
        for number, items in enumerate(layout.groups):
            for item in items:
                if not isinstance(item, Block):
                    self._add_loose(optimizer, under_way, number, item)
                elif found[item] is not Gradients.ALL:
                    for member in item.members:
                        self._add_loose(optimizer, under_way, number, member)
                else:
                    under_way.stepped.append(item)
                    if compiled is not None:
                        compiled.expect(under_way.block_optimizer, number, item)
                        continue
                    for flat, state in zip(item.flats, item.states, strict=True):
                        under_way.block_optimizer.add(number, flat, state or None)
        return under_way

    def _is_idle(self) -> bool:
        """Tells whether blocks were of no use in the step before, and still are not: then nothing else need be looked
        at."""
        self._idles = (
            self._idles
            and self._layout is not None
            and all(block.is_better_left() for block in self._layout.blocks)
        )
        return self._idles

    def _leave(self, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        """Gives the members of blocks memories of their own again.

        Blocks are of no use, and in steps that are not looked into a gradient may become sparse.
        """
        for member in (m for block in layout.blocks for m in block.members):
            self._moved.undo(member, optimizer.state.get(member, {}))
        self._is_left = True

    def _gradients_of(self, optimizer: torch.optim.Optimizer, block: Block) -> Gradients:
        found = Gradients.SOME if block in self._open else block.take_gradients()
        if found is Gradients.SOME:
            self._open[block] = tuple(m.grad is None for m in block.members)
            for member in block.members:
                if member.grad is not None and member.grad.layout is not torch.strided:
                    self._moved.undo(member, optimizer.state.get(member, {}))
        if found in (Gradients.SOME, Gradients.NONE):
            block.kind = object()  # its count of steps is another than that of the others from now on
        return found

    def _add_loose(
        self, optimizer: torch.optim.Optimizer, under_way: _UnderWay, group: int, one: Tensor
    ) -> None:
        under_way.loose.append(one)
        under_way.block_optimizer.add(group, one, optimizer.state.get(one))

    def _judge_switches(self, optimizer: torch.optim.Optimizer) -> None:
        if self._switches.has_changed(optimizer.param_groups):
            self._fusable_groups = self._fusable(optimizer)
            self._switches.take(optimizer.param_groups)  # not before: it raises in each step, if it does
            self._layout = None
            self._choice.options_changed()

    def _laid_out(self, optimizer: torch.optim.Optimizer) -> Layout:
        layout = self._layout
        if layout is None or self._is_left or self._is_stale(optimizer, layout):
            self._is_left = False
            self._open.clear()
            self._fusable_groups = self._fusable(optimizer)  # parameters may be of another precision by now
            layout = self._layout = lay_out(
                optimizer,
                self._fusable_groups,
                self._moved,
                moves=self._moves,
                cuts=self._choice.cuts_stateless,
                cuts_states=self._choice.cuts_states,
                compiled=self._compiled is not None,
                gradients_stay=self._choice.gradients_stay,
                sizes=self._sizes,
            )
        return layout

    def _is_stale(self, optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
        if self._open:
            # Laid out anew once the same gradients are absent twice running: a pattern that changes with every step
            # would cost a new layout with every step.
            if all(tuple(m.grad is None for m in block.members) == was for block, was in self._open.items()):
                return True
            layout.note_states(optimizer)
            for block in self._open:
                block.note_versions()
        return layout.why_stale(optimizer, self._looks_at_memory) is not None

    def _check(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells whether the compiled step gives what the optimizer's own does. Warns if not, and compiles no further
        one."""
        assert self._compiled is not None
        try:
            self._compiled.check(optimizer)
        except NotCompilable as error:
            warnings.warn(
                f"compile=True: the step of {type(optimizer).__name__} cannot be compiled ({error}); it works on "
                "blocks without being compiled",
                stacklevel=4,
            )
            self._compiled = None
            self._layout = None
            return False
        return True

    # -- after

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        if self._otherwise is not None:
            self._otherwise.end()
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        layout = self._layout
        assert layout is not None
        with torch.no_grad():
            if under_way.compiled is not None:
                under_way.compiled.run(under_way.stepped)
            try:
                self._bring_home(optimizer, layout, under_way)
            except NotBlockwise as error:
                self._layout = None
                raise FusedOptimizerError(
                    f"{type(optimizer).__name__} cannot be fused, and noticing it needed a step: {error}. "
                    "Begin again from a checkpoint without fuse_optimizer, and please tell us which optimizer it is"
                ) from error

    def _bring_home(self, optimizer: torch.optim.Optimizer, layout: Layout, under_way: _UnderWay) -> None:
        state, own = optimizer.state, under_way.block_optimizer.optimizer.state
        entries: dict[Tensor, Any] = {}
        # Torch's fused kernels write them back unscaled
        scales = getattr(optimizer, "grad_scale", None) is not None
        early, late = under_way.block_optimizer.names()
        changed = under_way.block_optimizer.give_back_state(optimizer, early)
        for block in under_way.stepped:
            block.forget_gradients(scales)
            made = under_way.compiled is None and block.take_states(own)
            if block.bring_home() or made:
                changed = True
                entries.update(zip(block.members, block.homes, strict=True))
        for one in under_way.loose:
            if one in own and state.get(one) is not own[one]:
                entries[one] = own[one]
                changed = True
        if entries:
            # in the order in which the optimizer alone would have made them: a state_dict shows it
            for one in (p for group in optimizer.param_groups for p in group["params"]):
                if one in entries:
                    state[one] = entries[one]
        if late and under_way.block_optimizer.give_back_state(optimizer, late):
            changed = True
        members = [m for block in under_way.stepped for m in block.members]
        if members:
            torch.autograd.graph.increment_version(members)  # they were written to under other names
        if under_way.block_optimizer.give_back(optimizer):
            self._switches.take(optimizer.param_groups)
        if changed:
            layout.note_states(optimizer)
        if self._choice.learn(under_way.stepped, under_way.compiled is not None):
            self._layout = None

    def _gradients_again(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the gradients again when a closure was called again within a step. Raises FusedOptimizerError."""
        under_way = self._under_way
        if under_way is None:
            return
        if under_way.compiled is not None:
            raise FusedOptimizerError(
                f"{type(optimizer).__name__} calls its closure more often than in a trial of the same step, "
                "which cannot be fused; leave fuse_optimizer out"
            )
        with torch.no_grad():
            for block in under_way.stepped:
                if block.take_gradients() is not Gradients.ALL:
                    raise FusedOptimizerError(
                        "the closure's second call left other parameters without a gradient than its first; "
                        "such a step cannot be fused"
                    )
