"""The job's state on this worker: models, optimizers and registered objects; captured, restored and rolled back.

`capture` and `restore` cover the whole state. A copy for a worker that joins travels in two parts: `bulk`, which no
step changes before its first optimizer step, and `rest`, which is captured when the holder's first reduction of the
step is in, so that it includes what the script did in the step so far. `snapshot` and `roll_back` cover what a failed
step may have changed: parameters and optimizer state are among it only in steps that go on behind an optimizer step
(boundary_copy.py).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from bagua_core.communication.step_interface import Stateful
from bagua_core.elastic.state import optimizer_state, state_codec
from bagua_core.elastic.state.boundary_copy import BoundaryCopy
from bagua_core.elastic.state.model_tensors import (
    ADDED_LATER,
    ALGORITHM,
    PARAMETER,
    ModelTensors,
    described,
    put_plain_gradient,
)
from bagua_core.model.scaler_state import ScalerSnapshot
from bagua_core.model.sharded_tensors import Layout, Meshes, is_sharded, local
from bagua_core.optimizers.inner_optimizers import same_groups, with_inner

SHARDING = "sharding"
"""The key of the fingerprint that says how tensors are sharded; absent where none is."""
_UNCHANGING = frozenset({int, float, str, bool, type(None)})
ORDER = "parameter order"
"""The key of the fingerprint that says which parameter each number in an optimizer's state is of."""


def _copied(value: Any) -> Any:
    """Copies like deepcopy, but quickly for the flat dictionaries that schedulers and scalers have."""
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    if type(value) is list:
        return [_copied(v) for v in value]
    if type(value) is tuple:
        return tuple(_copied(v) for v in value)
    return copy.deepcopy(value)


class StateRegistry:
    """Holds the models, optimizers and registered objects of this worker.

    The order of registration is the order on the wire, so it must agree on all workers.
    """

    def __init__(self) -> None:
        self.models: list[ModelTensors] = []
        self.equal_states = True
        self.optimizers: list[torch.optim.Optimizer] = []
        self.registered: dict[str, Stateful] = {}
        self._order = ""  # digest of parameter_names, taken when the fingerprint was first asked for
        self.watches = False  # whether steps may fail, so that the script's own changes are looked for
        self._snapshot_group_objects: list[list[dict[str, Any]]] = []
        self._snapshot_groups: list[list[dict[str, Any]]] = []  # by optimizer and group, without parameters
        self._snapshot_registered: dict[str, Any] = {}
        # ids of the parameters whose .grad an optimizer has used, in the step under way and in the one committed last
        self._moved: set[int] = set()
        self._moved_last: set[int] = set()
        self._has_gradients = False  # the step under way has had a backward
        self.boundary = BoundaryCopy()

    def add_model(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        travelling: Callable[[], Mapping[str, torch.Tensor]] = dict,
        equal_states: bool = True,
        put_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = put_plain_gradient,
    ) -> None:
        """Adds a model and its optimizers.

        travelling: an algorithm's own tensors for this model, see Exchange.travelling. equal_states: all ranks hold the
        same parameters after each step. put_gradient: see step_interface.Model.
        """
        self.equal_states = self.equal_states and equal_states
        self.models.append(ModelTensors(module, travelling, equal_states, put_gradient))
        self.add_optimizers(optimizers)

    def add_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Adds the optimizers that are not known yet, and those that they step."""
        for optimizer in with_inner(optimizers):
            if not any(optimizer is known for known in self.optimizers):
                self.optimizers.append(optimizer)
        self._order = ""

    def remove_model(self, module: nn.Module, still_used: list[torch.optim.Optimizer]) -> None:
        """Forgets the model that was added with `module`, and the optimizers that are not among `still_used`."""
        self.models[:] = [model for model in self.models if model.module is not module]
        self.equal_states = all(model.learns for model in self.models)
        used = with_inner(still_used)
        self.optimizers[:] = [o for o in self.optimizers if any(o is other for other in used)]
        self._snapshot_group_objects, self._snapshot_groups = [], []  # by place among the optimizers
        self._order = ""

    def register(self, name: str, stateful: Stateful) -> None:
        """Registers an object under a name.

        Raises TypeError if `stateful` has no state_dict/load_state_dict, ValueError if the name is taken.
        """
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise TypeError(
                f"register_state({name!r}, ...): {type(stateful).__name__} has no state_dict and load_state_dict"
            )
        if self.registered.get(name, stateful) is not stateful:
            raise ValueError(f"register_state({name!r}, ...): the name is taken; choose another")
        self.registered[name] = stateful

    # -- a step

    def snapshot(self, *, with_gradients: bool = True) -> None:
        """Remembers what a failed step gets back: volatile tensors, unused gradients, learning rates and registered
        states. with_gradients: False where no step fails alone, as within a round."""
        self._has_gradients = False
        self.boundary.step_begins()
        for model in self.models:
            model.snapshot(watches=self.watches, used=self._moved_last if with_gradients else None)
        self._snapshot_group_objects = [list(o.param_groups) for o in self.optimizers]
        self._snapshot_groups = [list(map(_hyperparameters, o.param_groups)) for o in self.optimizers]
        if self.registered:
            with torch.no_grad():
                self._snapshot_registered = {
                    name: ScalerSnapshot(s) if isinstance(s, GradScaler) else _copied(s.state_dict())
                    for name, s in self.registered.items()
                }

    def backward_begins(self, *, is_filler: bool = False) -> None:
        """Copies what .grad holds and the snapshot left out, because a backward is about to add to it.

        Called in every step, before its first gradient. is_filler: the backward is of samples that do not count, behind
        the step's others.
        """
        for model in self.models:
            model.backward_begins(is_filler=is_filler)

    @torch.no_grad()
    def take_back_fillers(self) -> None:
        """Restores what .grad held before fillers added to it; the step is committed."""
        for model in self.models:
            model.take_back_fillers()

    @torch.no_grad()
    def roll_back_gradients(self) -> None:
        """Restores what .grad held before the step.

        Called after roll_back, once the reducers have forgotten the step.
        """
        for model in self.models:
            model.roll_back_gradients()

    def find_changed(self) -> None:
        """Learns which parameters the script changes by itself. Called before the step's first optimizer step."""
        for model in self.models:
            model.find_changed()

    def first_reduced(self) -> None:
        """Keeps what later parts of the step change, if such are expected; the first reduction of the step is in."""
        if self.watches and self.equal_states:
            parameters: list[torch.Tensor] = []
            for model in self.models:
                parameters += model.without_copy()
            self.boundary.reduced(parameters, self.optimizers, len(self.models) > 1)

    @torch.no_grad()
    def protect(self) -> None:
        """Keeps all parameters after the step has failed: what the script changes from now on is undone too."""
        for model in self.models:
            model.protect()

    def gradients_begin(self) -> None:
        """Records that the step's first backward begins: an optimizer that stepped before it has used the gradients of
        the step before, and .grad is unused again."""
        if not self._has_gradients:
            self._has_gradients = True
            self._moved = set()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Records that `optimizer` has stepped.

        Without a copy of the boundary that is final, whatever becomes of the job's step.
        """
        moved: set[int] = set()
        for group in optimizer.param_groups:
            moved.update(map(id, group["params"]))
        self._moved |= moved
        for model in self.models if not self.boundary.is_kept else ():
            model.stepped(moved)

    def step_committed(self) -> None:
        """Records that the step under way is committed."""
        self._moved_last, self._moved = self._moved, set()
        self.boundary.drop()

    @torch.no_grad()
    def roll_back(self) -> tuple[str, ...]:
        """Goes back to the snapshot. Returns the names of parameters that keep a change, see ModelTensors.roll_back."""
        unknown: list[str] = []
        self._has_gradients = False
        for model in self.models:
            unknown += model.roll_back()
        if self.boundary.put_back():
            self._moved = set()
        objects = self._snapshot_group_objects
        for optimizer, groups, kept in zip(self.optimizers, self._snapshot_groups, objects, strict=False):
            optimizer.param_groups[:] = kept  # the step that is done again adds and removes them again
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _put_hyperparameters(group, values)
        for name, state in self._snapshot_registered.items():
            stateful = self.registered[name]
            if isinstance(state, ScalerSnapshot) and isinstance(stateful, GradScaler):
                state.restore(stateful)
            else:
                stateful.load_state_dict(_copied(state))
        return tuple(unknown)

    # -- the whole state

    def capture(self) -> dict[str, Any]:
        """Returns the state as nested plain values and the live tensors themselves: read, do not keep."""
        gradients = self.gradients()
        return {
            **({"gradients": gradients} if any(gradients) else {}),
            "modules": self.capture_modules(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            # Copies: the script may change these objects while a copy is under way.
            "registered": {name: _copied(s.state_dict()) for name, s in self.registered.items()},
        }

    @torch.no_grad()
    def capture_for_checkpoint(self, *, at_resume_point: bool = False) -> dict[str, Any]:
        """Returns the committed state in the form of `capture`, the same on all workers of one state name.

        Workers that write parts of it may be at different places of the script, so gradients that an optimizer has used
        are left out: some workers may have cleared them and others not.

        at_resume_point: a step is under way, and no optimizer has stepped in it; the state is what a roll-back of the
        step would restore.
        """
        if at_resume_point:
            rest = self.rest(at_resume_point=True)
            state = {
                "modules": [m.as_rolled_back(self.boundary.saved()) for m in self.models],
                "optimizers": [
                    {**o.state_dict(), **({} if groups is None else {"param_groups": groups})}
                    for o, groups in zip(self.optimizers, rest["groups"], strict=True)
                ],
                "registered": rest["registered"],
            }
        else:
            state = self.capture()
            state.pop("gradients", None)
        if self.equal_states:
            gradients = [
                m.unused_gradients(self._moved_last, before_step=at_resume_point) for m in self.models
            ]
            if any(gradients):
                state["gradients"] = gradients
        return state

    def capture_modules(self) -> list[dict[str, torch.Tensor]]:
        """Returns the parameters, buffers and algorithms' own tensors of each model: the live ones."""
        return [{name: t.detach() for name, t in m.everything().items()} for m in self.models]

    def bulk(self) -> dict[str, Any]:
        """Returns parameters, algorithms' tensors and the optimizers' states.

        The tensors are the live ones, stable until an optimizer steps.
        """
        return {
            "modules": [{n: t.detach() for n, t in m.lasting().items()} for m in self.models],
            "optimizers": [_without_groups(o.state_dict()) for o in self.optimizers],
        }

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """Returns what .grad holds on this worker, for each model: the live tensors.

        A script may add to it in later steps.
        """
        if not self.equal_states:
            return [{} for _ in self.models]  # each worker's own, which nothing else of the job depends on
        return [m.gradients() for m in self.models]

    @torch.no_grad()
    def rest(self, *, at_resume_point: bool) -> dict[str, Any]:
        """Returns everything but `bulk`, as copies, and beside it what a failed step would go back to ("resume").

        The values are those of now; parameters that the script changed in the step so far are then here too, and count
        more than those in `bulk`. at_resume_point: the values are those that a failed step would go back to.
        """
        # Before the values are read
        changed = [{} if at_resume_point else m.find_changed() for m in self.models]
        resume = {
            "modules": [m.at_resume_point() for m in self.models],
            "groups": _copied(self._snapshot_groups),
            "registered": {
                name: state.state_dict() if isinstance(state, ScalerSnapshot) else _copied(state)
                for name, state in self._snapshot_registered.items()
            },
        }
        groups = [_copied(o.state_dict().get("param_groups")) for o in self.optimizers]
        if at_resume_point:
            for of_one, values in zip(groups, self._snapshot_groups, strict=False):
                for group, hyperparameters in zip(of_one or (), values, strict=False):
                    group.update(_copied(hyperparameters))
            modules, registered = resume["modules"], resume["registered"]
        else:
            now = [{**m.volatile(), **found} for m, found in zip(self.models, changed, strict=True)]
            modules = [{n: t.detach().clone() for n, t in tensors.items()} for tensors in now]
            registered = {name: _copied(s.state_dict()) for name, s in self.registered.items()}
        resume["goes_on"] = self.boundary.steps_left
        return {
            "modules": modules,
            "groups": groups,
            "registered": registered,
            "resume": resume,
            # of the gradients: the receiver leaves the same out of checkpoints
            "used": [m.names_of(self._moved_last) for m in self.models],
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Takes over a captured state of the same models, or `bulk` and `rest` together. Where it has no
        gradients .grad becomes None.

        Its tensors may become the optimizers' own, so they must own their memory. Raises KeyError or ValueError if it
        does not fit, OptimizerStateMismatch if an optimizer does not take it.
        """
        state = self._placed(state)
        for model, tensors in zip(self.models, state["modules"], strict=True):
            missing = model.lasting().keys() - tensors.keys() - ADDED_LATER
            if missing:
                raise KeyError(f"the state lacks {sorted(missing)}")
            model.put(tensors)
        with same_groups(self.optimizers):
            for optimizer, optimizer_state_dict in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer_state.load(optimizer, optimizer_state_dict)
        for name, value in state["registered"].items():
            self.registered[name].load_state_dict(value)
        none: list[dict[str, torch.Tensor]] = [{} for _ in self.models]  # capture leaves the key out for it
        for model, gradients in zip(self.models, state.get("gradients", none), strict=False):
            model.take_gradients(gradients)
        self._moved_last = set()

    def _placed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns `state` with its sharded tensors on the meshes of the models. Raises UnknownMesh."""
        placed: dict[str, Any] = Meshes(p for m in self.models for p in m.parameters()).placed(state)
        return placed

    @torch.no_grad()
    def restore_parts(self, bulk: dict[str, Any], rest: dict[str, Any]) -> None:
        """Takes over `bulk` and `rest` of another worker, both captured in one step. Raises as `restore`."""
        rest = self._placed(rest)
        resume = _copied(rest["resume"])  # its tensors may be the very ones that become live
        modules = [{**a, **b} for a, b in zip(bulk["modules"], rest["modules"], strict=True)]
        optimizers = [
            {**values, "param_groups": groups} if groups is not None else values
            for values, groups in zip(bulk["optimizers"], rest["groups"], strict=True)
        ]
        self.restore(
            {
                "modules": modules,
                "optimizers": optimizers,
                "registered": rest["registered"],
                # () in the middle of a step: .grad is then this worker's part of it
                "gradients": rest.get("gradients") or bulk.get("gradients", ()),
            }
        )
        used = zip(self.models, rest["used"], strict=True)
        self._moved_last = {i for model, names in used for i in model.ids_of(names)}
        for model, tensors in zip(self.models, resume["modules"], strict=True):
            model.adopt(tensors)
        self._snapshot_group_objects = [list(o.param_groups) for o in self.optimizers]
        self._snapshot_groups = resume["groups"]
        self._snapshot_registered = resume["registered"]
        self.boundary.steps_left = resume["goes_on"]

    def check_travels(self) -> None:
        """Checks that the state can be copied to another worker: better at the first boundary than when a worker joins.

        Raises StateCodecError naming what could not be copied.
        """
        state_codec.encode(
            {
                "optimizers": [o.state_dict() for o in self.optimizers],
                "registered": {name: s.state_dict() for name, s in self.registered.items()},
            }
        )

    def parameters(self) -> list[torch.Tensor]:
        """Returns each parameter once; of a sharded one the local tensor.

        It is the parameter itself: another alias of its memory would outlive a move of the parameter to other memory.
        """
        return [local(p) for m in self.models for p in m.parameters()]

    def parameter_names(self) -> list[list[str | None]]:
        """Returns the name of each parameter of each optimizer, by its number in the optimizer's state.

        The name is None for a parameter that is in no model. From the second model on, names have the model's number
        before them.
        """
        names: dict[int, str] = {}
        for number, model in enumerate(self.models):
            for name, parameter in model.lasting().items():
                own = name.removeprefix(PARAMETER)
                names.setdefault(id(parameter), f"{number}.{own}" if number else own)
        return [
            [names.get(id(p)) for group in o.param_groups for p in group["params"]] for o in self.optimizers
        ]

    def other_names(self) -> list[dict[str, str]]:
        """Returns ModelTensors.other_names of each model."""
        return [model.other_names() for model in self.models]

    def fingerprint(self) -> dict[str, str]:
        """Returns the properties that must agree on all workers for one to heal from another.

        They are the same whenever they are asked for, before the first step as after many: buffers, which a forward may
        make or give another shape, count as they were when the model was wrapped, and so do groups of an optimizer,
        which a script may add in its training.
        """
        self._order = self._order or _digest([repr(names) for names in self.parameter_names()])
        lines = [line for m in self.models for line in (*_described(m.lasting()), *m.buffers_described)]
        sharded = [
            layout
            for m in self.models
            for layout in (
                *(Layout.of(t).described for t in m.lasting().values() if is_sharded(t)),
                *m.buffer_layouts,
            )
        ]
        count = sum(p.numel() for m in self.models for p in m.parameters())
        return {
            "model": f"{count} parameters, shapes {_digest(lines)}",
            "optimizers": ", ".join(type(o).__name__ for o in self.optimizers) or "none",
            **({ORDER: self._order} if self.optimizers else {}),
            "registered": ", ".join(self.registered) or "none",
            **({SHARDING: _digest(sharded)} if sharded else {}),
        }


def _described(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns a line for each tensor that every version has.

    An algorithm's own tensors follow the local shards, whose sizes may differ in a replica.
    """
    sharded = next((t for t in tensors.values() if is_sharded(t)), None)
    cut = "" if sharded is None else f"cut for {Layout.of(sharded).mesh_shape}"
    return [
        f"{name}:{cut}:{t.dtype}" if cut and name.startswith(ALGORITHM) else described(name, t)
        for name, t in tensors.items()
        if name not in ADDED_LATER
    ]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _without_groups(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if key != "param_groups"}


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(group)
    values.pop("params", None)
    if _UNCHANGING.issuperset(map(type, values.values())):
        return values
    for name, value in values.items():
        if type(value) not in _UNCHANGING:
            values[name] = _copied(value)
    return values


def _put_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        current = group.get(name)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            current.copy_(value)  # a captured graph or a compiled step holds this very tensor
        else:
            group[name] = _copied(value)
