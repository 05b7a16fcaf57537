"""Copies the state of a GradScaler and puts it back without a wait of the host for the device.

`GradScaler.state_dict` reads its scale and its growth counter from the GPU, so the host is blocked until all work given
so far is done: twice in every step that keeps a snapshot. Here both stay on the device. Relies on the two tensors that
torch keeps in `_scale` and `_growth_tracker`; a scaler without them is read by `state_dict`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

_TENSORS = ("_scale", "_growth_tracker")
_NUMBERS = ("_growth_factor", "_backoff_factor", "_growth_interval", "_init_scale", "_init_growth_tracker")


class ScalerSnapshot:
    """A copy of a scaler's state at one moment of the calling thread's stream."""

    def __init__(self, scaler: GradScaler) -> None:
        self._tensors: dict[str, torch.Tensor | None] = {}
        self._numbers: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        if not scaler.is_enabled():
            return
        if not all(hasattr(scaler, name) for name in (*_TENSORS, *_NUMBERS)):
            self._state = scaler.state_dict()
            return
        for name in _TENSORS:
            tensor = getattr(scaler, name)
            self._tensors[name] = None if tensor is None else tensor.detach().clone()
        self._numbers = {name: getattr(scaler, name) for name in _NUMBERS}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as `GradScaler.state_dict` gives it. The host waits for the device."""
        if self._state is not None or not self._numbers:
            return dict(self._state or {})
        scale, tracker = self._tensors["_scale"], self._tensors["_growth_tracker"]
        return {
            "scale": self._numbers["_init_scale"] if scale is None else float(scale),
            "growth_factor": self._numbers["_growth_factor"],
            "backoff_factor": self._numbers["_backoff_factor"],
            "growth_interval": self._numbers["_growth_interval"],
            "_growth_tracker": self._numbers["_init_growth_tracker"] if tracker is None else int(tracker),
        }

    def restore(self, scaler: GradScaler) -> None:
        """Gives `scaler` the state. Its tensors stay the same objects where it has them."""
        if self._state is not None:
            scaler.load_state_dict(self._state)
            return
        for name, number in self._numbers.items():
            setattr(scaler, name, number)
        for name, kept in self._tensors.items():
            current = getattr(scaler, name)
            if kept is not None and current is not None:
                current.copy_(kept)
            else:
                # made since the snapshot, by the first use of the scaler: the next one makes them again
                setattr(scaler, name, None if kept is None else kept.clone())


def unchanged_scale(scaler: GradScaler) -> float | torch.Tensor:
    """Returns the scale as `GradScaler.update` takes it, to set it to what it is."""
    scale = getattr(scaler, "_scale", None)
    return scale.detach().clone() if isinstance(scale, torch.Tensor) else float(scaler.get_scale())
