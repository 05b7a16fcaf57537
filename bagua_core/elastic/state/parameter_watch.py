"""Finds out which parameters the script changes by itself, without the optimizer.

A parameter that only an optimizer changes needs no copy for a roll-back: in a failed step the optimizer does nothing.
One that the script changes in a step (a momentum encoder, clamping, an average of weights written in place) needs one,
and a copy of every parameter in every step would cost a pass over the model. So the watch learns which they are. In
every step a change is seen by the tensor's version counter and address; changes through `.data` are seen in audits, in
the first steps and every AUDIT_EVERY steps after. An audit compares with a copy, or with digests where the copy would
exceed LARGEST_COPY_BYTES.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagua_core.elastic.state import flat_tensors
from bagua_core.elastic.state.copies_apart import copied_apart
from bagua_core.model import sharded_tensors

FIRST_AUDITS = 4
AUDIT_EVERY = 64
LARGEST_COPY_BYTES = 256 << 20


class ParameterWatch:
    """Watches the parameters between the beginning of a step and its first reduction."""

    def __init__(self) -> None:
        self._steps = 0
        self._watched: Mapping[str, torch.Tensor] = {}
        self._marks: list[tuple[int, ...]] = []
        self._copies: list[torch.Tensor] = []
        self._digests: list[int] = []

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Starts to watch `parameters`, by name, in a step that begins.

        They are those that only an optimizer is known to change.
        """
        self._watched = parameters
        self._marks = sharded_tensors.versions(parameters.values())
        self._copies, self._digests = [], []
        if self._steps < FIRST_AUDITS or self._steps % AUDIT_EVERY == 0:
            if sum(map(sharded_tensors.local_bytes, parameters.values())) <= LARGEST_COPY_BYTES:
                self._copies = copied_apart(parameters.values())
            else:
                self._digests = [_digest(p) for p in parameters.values()]
        self._steps += 1

    def changed(self) -> dict[str, torch.Tensor | None]:
        """Returns the watched parameters that have changed since `begin`.

        Each has its value (local tensor) at that time, or None if no copy was taken in this step.
        """
        found: dict[str, torch.Tensor | None] = {}
        marks = sharded_tensors.versions(self._watched.values())
        if marks == self._marks and not self._copies and not self._digests:
            return found
        for place, (name, parameter) in enumerate(self._watched.items()):
            differs = marks[place] != self._marks[place]
            if self._copies:
                differs = differs or not _equal(parameter, self._copies[place])
            elif self._digests:
                differs = differs or _digest(parameter) != self._digests[place]
            if differs:
                # its own memory: it may be kept for good, and the copies of the others are not
                found[name] = self._copies[place].clone() if self._copies else None
        return found

    def end(self) -> None:
        """Forgets the step: from now on the optimizer changes parameters."""
        self._watched, self._marks, self._copies, self._digests = {}, [], [], []


def _equal(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    own = sharded_tensors.local(parameter).detach()
    return own.shape == copy.shape and torch.equal(own, copy)


def _digest(parameter: torch.Tensor) -> int:
    return flat_tensors.digest([sharded_tensors.local(parameter).detach()])
