"""What belongs to the job's state on this worker, and what of it a failed step must restore?

Owns the list of models, optimizers and registered objects. `capture`/`restore` cover the whole state (a
heal); `snapshot`/`roll_back` only what a failed step may have touched: parameters and their optimizer
state never change in one, since its `optimizer.step` does nothing; learning rates may.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from bagua_core.elastic import state_codec
from bagua_core.module_buffers import ModuleBuffers


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def _copied(value: Any) -> Any:
    """Like deepcopy, but quick for the flat dictionaries that schedulers and scalers have."""
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
    """Order of registration is the order on the wire, so it must agree on all workers."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.equal_states = True
        self.optimizers: list[torch.optim.Optimizer] = []
        self.registered: dict[str, Stateful] = {}
        self._module_buffers: list[ModuleBuffers] = []
        self._travelling: list[Callable[[], Mapping[str, torch.Tensor]]] = []
        self._snapshot_buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._snapshot_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._snapshot_registered: dict[str, Any] = {}

    def add_model(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        travelling: Callable[[], Mapping[str, torch.Tensor]] = dict,
        equal_states: bool = True,
    ) -> None:
        """travelling: an algorithm's own tensors for this model, see Exchange.travelling. equal_states: all ranks hold
        the same parameters after each step."""
        self.equal_states = self.equal_states and equal_states
        self.modules.append(module)
        self._travelling.append(travelling)
        self._module_buffers.append(ModuleBuffers(module))
        for optimizer in optimizers:
            if not any(optimizer is known for known in self.optimizers):
                self.optimizers.append(optimizer)

    def register(self, name: str, stateful: Stateful) -> None:
        """Raises TypeError if `stateful` has no state_dict/load_state_dict, ValueError if the name is taken."""
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise TypeError(
                f"register_state({name!r}, ...): {type(stateful).__name__} has no state_dict and load_state_dict"
            )
        if self.registered.get(name, stateful) is not stateful:
            raise ValueError(f"register_state({name!r}, ...): the name is taken; choose another")
        self.registered[name] = stateful

    # -- a step's snapshot

    def snapshot(self) -> None:
        """Remember what a failed step must get back. Cheap: buffers, learning rates and registered states."""
        buffers = [b for of_module in self._module_buffers for b in of_module.current()]
        if len(self._snapshot_buffers) == len(buffers) and all(
            kept is b for (kept, _), b in zip(self._snapshot_buffers, buffers, strict=True)
        ):
            for buffer, saved in self._snapshot_buffers:
                saved.copy_(buffer)
        else:
            self._snapshot_buffers = [(b, b.detach().clone()) for b in buffers]
        # A scheduler that is stepped before the step failed has changed them already, and does not undo it.
        self._snapshot_groups = [
            (group, {name: _copied(value) for name, value in group.items() if name != "params"})
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        if self.registered:
            self._snapshot_registered = {n: _copied(s.state_dict()) for n, s in self.registered.items()}

    def roll_back(self) -> None:
        with torch.no_grad():
            for buffer, saved in self._snapshot_buffers:
                buffer.copy_(saved)
            for group, values in self._snapshot_groups:
                for name, value in values.items():
                    current = group.get(name)
                    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                        current.copy_(value)  # a captured graph or a compiled step holds this very tensor
                    else:
                        group[name] = _copied(value)
        for name, state in self._snapshot_registered.items():
            self.registered[name].load_state_dict(_copied(state))

    # -- the whole state

    def capture(self) -> dict[str, Any]:
        """The state as nested plain values and the live tensors themselves: read, do not keep."""
        return {
            "modules": self.capture_modules(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            # Copies: the script may change these objects while a copy is under way.
            "registered": {name: _copied(s.state_dict()) for name, s in self.registered.items()},
        }

    def capture_modules(self) -> list[dict[str, torch.Tensor]]:
        """Parameters, buffers and algorithms' own tensors of each model: the live ones."""
        return [{name: t.detach() for name, t in self._tensors(i)} for i in range(len(self.modules))]

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state of the same models. Raises KeyError or ValueError where it does not fit."""
        with torch.no_grad():
            for index, tensors in zip(range(len(self.modules)), state["modules"], strict=True):
                for name, tensor in self._tensors(index):
                    tensor.copy_(tensors[name])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        for name, value in state["registered"].items():
            self.registered[name].load_state_dict(value)

    def _tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        module = self.modules[index]
        for name, parameter in module.named_parameters():
            yield "parameter." + name, parameter
        for name, tensor in self._travelling[index]().items():
            yield "algorithm." + name, tensor
        for name, buffer in module.named_buffers():
            yield "buffer." + name, buffer

    def check_travels(self) -> None:
        """Raises StateCodecError naming what could not be copied to another worker: better at the first boundary than
        when somebody joins."""
        state_codec.encode(
            {
                "optimizers": [o.state_dict() for o in self.optimizers],
                "registered": {name: s.state_dict() for name, s in self.registered.items()},
            }
        )

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach() for m in self.modules for p in m.parameters()]

    def fingerprint(self) -> dict[str, str]:
        """What must agree on all workers for one to heal from another."""
        described = [
            f"{name}:{tuple(t.shape)}:{t.dtype}"
            for i in range(len(self.modules))
            for name, t in self._tensors(i)
        ]
        count = sum(p.numel() for p in self.parameters())
        digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]
        return {
            "model": f"{count} parameters, shapes {digest}",
            "optimizers": ", ".join(type(o).__name__ for o in self.optimizers) or "none",
            "registered": ", ".join(self.registered) or "none",
        }
