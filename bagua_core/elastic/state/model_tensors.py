"""Holds the tensors of one model by name, and takes back what a failed step changed of them.

A step may change buffers at any time, and the parameters that the script changes by itself (parameter_watch.py): these
are the *volatile* tensors, and a snapshot keeps a copy of them. All other parameters change only in optimizer steps
that are final. Names begin with "parameter.", "algorithm." or "buffer.". For a sharded tensor (DTensor), the local
tensor is copied, compared and written; the object stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import torch
from torch import nn

from bagua_core.communication.weights.exchange_clock import STATE
from bagua_core.elastic.state.heal_memory import is_out_of_memory
from bagua_core.elastic.state.parameter_watch import ParameterWatch
from bagua_core.model.module_buffers import ModuleBuffers
from bagua_core.model.overlapping_memory import write
from bagua_core.model.sharded_tensors import Layout, copied, is_sharded, like, local

PARAMETER, ALGORITHM, BUFFER = "parameter.", "algorithm.", "buffer."
ADDED_LATER = frozenset({ALGORITHM + STATE})
"""Tensors that checkpoints of earlier versions lack: they have their first values where a job goes on from one."""


def described(name: str, tensor: torch.Tensor) -> str:
    """Returns the fingerprint's line for a tensor: name, shape and data type."""
    return f"{name}:{tuple(tensor.shape)}:{tensor.dtype}"


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copies `value` into the memory of `tensor` without autograd's knowledge.

    A graph that holds `tensor` for a later backward stays usable. Values are put in steps whose gradients from this
    worker count nothing, so what it computes does not matter. Raises ValueError if this worker's part of a sharded
    tensor has another shape.
    """
    if is_sharded(tensor) and local(tensor).shape != local(value).shape:
        raise ValueError(
            f"the state has {tuple(local(value).shape)} of a tensor of shape {tuple(tensor.shape)}, of which this "
            f"worker holds {tuple(local(tensor).shape)}"
        )
    write(local(tensor).data, local(value))


def put_plain_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Makes `value` the parameter's .grad, where no reducer keeps memory for it."""
    parameter.grad = None if value is None else value.to(parameter.device)


class ModelTensors:
    """Holds one model's tensors and the snapshot that a failed step goes back to.

    travelling: an algorithm's own tensors, see Exchange.travelling. learns: whether a parameter that changed before the
    step's first reduction was changed by the script; False where the algorithm may do so. put_gradient: makes a value a
    parameter's .grad, see Model.put_gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        travelling: Callable[[], Mapping[str, torch.Tensor]] = dict,
        learns: bool = True,
        put_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = put_plain_gradient,
    ) -> None:
        self.module = module
        self._put_gradient = put_gradient
        self._travelling = travelling
        self._buffers = ModuleBuffers(module)
        self.learns = learns
        self._watch = ParameterWatch()
        self._learned: set[str] = set()  # names of parameters that the script changes
        self._parameters: dict[str, torch.Tensor] = {}
        # the snapshot: the volatile tensors themselves, and copies of their values
        self._taken = False
        self._objects: dict[str, torch.Tensor] = {}
        self._values: dict[str, torch.Tensor] = {}
        # copies of all other parameters, from the moment at which the step failed
        self._protected: dict[str, torch.Tensor] = {}
        self._unknown: tuple[str, ...] = ()
        # buffers when the model was wrapped: name, shape and data type, and how the sharded ones are cut
        self.buffers_described, self.buffer_layouts = self._described_buffers()
        # copies of what .grad held at the resume point; None: there is no step to roll back
        self._gradients: dict[str, torch.Tensor] | None = None
        # names of those that an optimizer had used by then: they are copied when the step's first backward begins
        self._late_gradients: set[str] = set()
        self._before_fillers: dict[str, torch.Tensor] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Reads the module's parameters and buffers again, because the module may have got others.

        Between a forward and its backward fully_shard has plain, gathered parameters in the places of the sharded ones.
        An optimizer changes the sharded ones: those are the model's.
        """
        self._buffers.refresh()
        known = self._parameters
        self._parameters = {
            PARAMETER + n: _sharded(known.get(PARAMETER + n), p) for n, p in self.module.named_parameters()
        }

    def parameters(self) -> list[torch.Tensor]:
        """Returns the live parameters, each once."""
        self.refresh()
        return list(self._parameters.values())

    # -- all tensors

    def lasting(self) -> dict[str, torch.Tensor]:
        """Returns the live parameters and the algorithm's live tensors."""
        self.refresh()
        return {**self._parameters, **{ALGORITHM + n: t for n, t in self._travelling().items()}}

    def volatile(self) -> dict[str, torch.Tensor]:
        """Returns the live tensors that a step may change at any time."""
        buffers = self._buffers.named()
        if buffers:
            buffers = {BUFFER + n: b for n, b in buffers.items()}
        if not self._learned:
            return buffers
        learned = {n: self._parameters[n] for n in sorted(self._learned) if n in self._parameters}
        return {**learned, **buffers}

    def _described_buffers(self) -> tuple[list[str], list[str]]:
        buffers = self._buffers.named()
        return (
            [described(BUFFER + name, buffer) for name, buffer in buffers.items()],
            [Layout.of(buffer).described for buffer in buffers.values() if is_sharded(buffer)],
        )

    def everything(self) -> dict[str, torch.Tensor]:
        """Returns all live tensors: parameters in the module's order, the algorithm's, buffers."""
        return {**self.lasting(), **{BUFFER + n: b for n, b in self._buffers.named().items()}}

    def other_names(self) -> dict[str, str]:
        """Returns the further names of parameters and buffers, with the name that `everything` has; both without
        prefixes."""
        found: dict[str, str] = {}
        for named in (nn.Module.named_parameters, nn.Module.named_buffers):
            first: dict[int, str] = {}
            for name, tensor in named(self.module, remove_duplicate=False):
                own = first.setdefault(id(tensor), name)
                if own != name:
                    found[name] = own
        return found

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Gives the tensors these values. A buffer is found by name, whatever tensor has the name now.

        Raises KeyError for a parameter that the model lacks.
        """
        live = self.everything()
        for name, value in values.items():
            present = live.get(name)
            if not name.startswith(BUFFER):
                overwrite(live[name], value)
            elif (
                present is not None
                and local(present).shape == local(value).shape
                and present.dtype == value.dtype
            ):
                overwrite(present, value)
            else:
                device = present.device if present is not None else _device_of(self.module)
                self._buffers.put(name.removeprefix(BUFFER), value.to(device))

    # -- a step

    def snapshot(self, *, watches: bool, used: Collection[int] | None = ()) -> None:
        """Takes the snapshot of a step that begins.

        watches: look for parameters that the script changes. used: ids of the parameters whose gradients an optimizer
        has used in the step before; None: gradients are not copied.
        """
        live = self.volatile()
        kept, self._values = self._values, {}
        if live:
            self._values = {
                n: kept[n] if _alike(kept.get(n), local(t)) else torch.empty_like(local(t))
                for n, t in live.items()
            }
            torch._foreach_copy_(list(self._values.values()), [local(t).detach() for t in live.values()])
        self._objects = live
        self._taken = True
        self._protected = {}
        self._unknown = ()
        # At once, because a script may use an unused gradient at the top of a step: unscale, clip and clear it. Most
        # scripts leave used ones only, which a step clears or adds to: their copies are made where a backward adds.
        self._gradients = self._before_fillers = None  # first, so that there are never copies of two steps
        self._late_gradients = set()
        if used is not None:
            self._gradients = self._unused_copies(used)
        if watches and self.learns:
            watched = self._parameters
            if self._learned:
                watched = {n: p for n, p in watched.items() if n not in self._learned}
            self._watch.begin(watched)
        else:
            self._watch.end()

    def _unused_copies(self, used: Collection[int]) -> dict[str, torch.Tensor]:
        """Returns copies of the gradients of parameters that are not in `used`, and notes the names of the others."""
        held = {n: p for n, p in self._parameters.items() if p.grad is not None}
        if all(map(used.__contains__, map(id, held.values()))):
            self._late_gradients = set(held)  # the usual step: no Python code for each parameter
            return {}
        self._late_gradients = {n for n, p in held.items() if id(p) in used}
        unused = [(n, p.grad) for n, p in held.items() if n not in self._late_gradients]
        return {n: g.detach().clone() for n, g in unused if g is not None}

    def find_changed(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that the script was found to change in this step; from now on they are volatile.

        Called before the step's first optimizer step, and when the step fails.
        """
        changed = self._watch.changed()
        self._watch.end()
        if not changed:
            return {}
        for name, before in changed.items():
            self._learned.add(name)
            if before is not None:
                self._objects[name], self._values[name] = self._parameters[name], before
        self._unknown += tuple(n for n, before in changed.items() if before is None)
        return {name: self._parameters[name] for name in changed}

    def without_copy(self) -> list[torch.Tensor]:
        """Returns the parameters of which the snapshot has no values."""
        if not self._objects:
            return list(self._parameters.values())
        return [p for n, p in self._parameters.items() if n not in self._objects]

    def protect(self) -> None:
        """Copies all parameters after the step has failed, because the script may still change them before its end."""
        self.find_changed()
        self._protected = {n: _copy(p) for n, p in self._parameters.items() if n not in self._values}

    def stepped(self, moved: Collection[int]) -> None:
        """Takes the parameters with these ids into the snapshot as they are now.

        An optimizer moved them, and that is final even if the step fails later.
        """
        for name, tensor in self._objects.items():
            if id(tensor) in moved:
                self._values[name].copy_(local(tensor).detach())

    def roll_back(self) -> tuple[str, ...]:
        """Takes back the step under way.

        Returns the names of parameters that keep a change of the script's: it was the first that was seen of them, and
        no copy was at hand.
        """
        if not self._taken:
            return ()
        buffers = self._buffers.named()
        for name in buffers.keys() - {n.removeprefix(BUFFER) for n in self._objects if n.startswith(BUFFER)}:
            self._buffers.put(name, None)  # it was made in this step
        for name, value in self._values.items():
            kept, own = self._objects[name], name.removeprefix(BUFFER)
            if name.startswith(BUFFER) and buffers.get(own) is not kept:
                self._buffers.put(own, kept)
            overwrite(kept, value)
        for name, value in self._protected.items():
            parameter = self._parameters[name]
            if parameter.device != value.device or not torch.equal(local(parameter).detach(), value):
                overwrite(parameter, value)
        self._protected = {}
        return self._unknown

    def as_rolled_back(
        self, saved: Mapping[int, torch.Tensor] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        """Returns all tensors as a roll-back of the step under way would leave them; nothing is changed.

        saved: values that the roll-back takes from a copy of the boundary, by the parameter's id.
        """
        if not self._taken:
            return {n: t.detach() for n, t in self.everything().items()}
        kept = {**self._protected, **self._values}
        own = {
            n: like(t, self._values.get(n, saved.get(id(t), kept.get(n, t))))
            for n, t in self.lasting().items()
        }
        return {
            **{n: t.detach() for n, t in own.items()},
            **{n: t for n, t in kept.items() if n.startswith(BUFFER)},
        }

    def at_resume_point(self) -> dict[str, torch.Tensor]:
        """Returns copies of the volatile tensors as the snapshot has them: local tensors."""
        return {name: value.clone() for name, value in self._values.items()}

    # -- gradients

    def names_of(self, ids: Collection[int]) -> list[str]:
        """Returns the names of the parameters with these ids."""
        return [n for n, p in self._parameters.items() if id(p) in ids]

    def ids_of(self, names: Collection[str]) -> set[int]:
        """Returns the ids of the parameters with these names."""
        return {id(self._parameters[n]) for n in names if n in self._parameters}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns what .grad holds: the live tensors."""
        return {n: p.grad.detach() for n, p in self._parameters.items() if p.grad is not None}

    def unused_gradients(self, used: Collection[int], *, before_step: bool) -> dict[str, torch.Tensor]:
        """Returns `gradients` without those of the parameters with ids in `used`.

        before_step: as they were at the resume point of the step under way.
        """
        held = self._gradients if before_step and self._gradients is not None else self.gradients()
        return {
            n: g for n, g in held.items() if n in self._parameters and id(self._parameters[n]) not in used
        }

    def put_gradients(self, values: Mapping[str, torch.Tensor], but: Collection[str] = ()) -> None:
        """Makes these values the parameters' .grad; that of all other parameters becomes None, except those in
        `but`."""
        for name, parameter in self._parameters.items():
            value = values.get(name)
            if name not in but and (value is not None or parameter.grad is not None):
                self._put_gradient(parameter, value)

    def backward_begins(self, *, is_filler: bool) -> None:
        """Copies those gradients that the snapshot left out, before a backward adds to them.

        Only the first backward of a step makes this copy. The first one of a filler copies all gradients.
        """
        if self._gradients is not None and self._late_gradients:
            late, self._late_gradients = self._late_gradients, set()
            held = [(n, p.grad) for n, p in self._parameters.items() if p.grad is not None]
            self._gradients.update({n: g.detach().clone() for n, g in held if n in late})
        if is_filler and self._before_fillers is None:
            self._before_fillers = {n: g.clone() for n, g in self.gradients().items()}

    def take_back_fillers(self) -> None:
        """Removes from .grad what fillers have added to it, which is no part of the step."""
        if self._before_fillers is not None:
            self.put_gradients(self._before_fillers)
            self._before_fillers = None

    def take_gradients(self, values: Mapping[str, torch.Tensor]) -> None:
        """Makes the gradients of a copied state the parameters' .grad.

        The step under way goes back to them, and not to this worker's earlier ones.
        """
        self.put_gradients(values)
        if self._gradients is not None:
            self._gradients = {n: g.clone() for n, g in self.gradients().items()}
            self._late_gradients = set()
        if self._before_fillers is not None:
            self._before_fillers = {n: g.clone() for n, g in self.gradients().items()}

    def roll_back_gradients(self) -> None:
        """Restores .grad as it was before a step that did not happen; the reducer has forgotten that step.

        Used gradients that no backward has added to stay as they are.
        """
        if self._gradients is not None:
            self.put_gradients(self._gradients, but=self._late_gradients)
            self._gradients, self._late_gradients = None, set()

    def adopt(self, at_resume_point: Mapping[str, torch.Tensor]) -> None:
        """Makes a failure of the step go back to the holder's values; a state was copied in the middle of the step."""
        live = self.everything()
        self._learned |= {n for n in at_resume_point if n.startswith(PARAMETER)}
        self._watch.end()
        volatile = self.volatile()
        self._objects = {n: live[n] for n in {**volatile, **at_resume_point} if n in live}
        self._values = {
            n: (local(at_resume_point[n]).to(t.device) if n in at_resume_point else copied(t))
            for n, t in self._objects.items()
        }
        self._taken = True
        self._protected = {}
        self._unknown = ()


def _sharded(known: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the sharded tensor of which `parameter`, which has its name now, is the gathered form; else `parameter`.

    Above tensor parallelism the gathered form is sharded too, on a mesh of fewer dimensions.
    """
    if known is None or known is parameter or not is_sharded(known):
        return parameter
    if is_sharded(parameter) and parameter.device_mesh.ndim >= known.device_mesh.ndim:  # type: ignore[attr-defined]
        return parameter
    return known if known.shape == parameter.shape else parameter


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor on its own device, or to the host if that device has no memory left.

    A failed step must not fail for lack of memory.
    """
    try:
        return copied(tensor)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or tensor.device.type == "cpu":
            raise
        return local(tensor).detach().cpu()


def _alike(kept: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return (
        kept is not None
        and kept.shape == tensor.shape
        and kept.dtype == tensor.dtype
        and kept.device == tensor.device
    )


def _device_of(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
