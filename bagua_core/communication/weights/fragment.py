"""Keeps a fragment of the model: its anchor and momentum, its weights, and the exchange that is under way.

Owns the fragment's buffers. Knows no schedule and no peers. Invariant: anchor and momentum change in `settle` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bagua_core.communication.communicator import Pending
from bagua_core.communication.weights.outer_step import OuterStep
from bagua_core.communication.weights.weight_buckets import FlatWeights


@dataclass(slots=True)
class Flight:
    """An exchange under way. gradients: this worker's pseudo-gradients, and their mean over the workers once `pending`
    is done. sent: the step. samples: that this worker had used by then. errors: what compression leaves for the next
    exchange; none: zero."""

    sent: int
    samples: float
    gradients: list[torch.Tensor]
    pending: Pending
    errors: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Applied:
    """A flight whose result the weights have, for as long as the step can fail."""

    flight: Flight  # its gradients have become the next anchor
    momentum: list[torch.Tensor]
    weights: FlatWeights  # as they were


@dataclass(slots=True)
class OwnState:
    """The state that belongs to this worker alone, under one value of the fragment's clock. began: samples that this
    worker had used when the fragment's round began. errors: what it has not sent yet; none: zero."""

    clock: int = -1
    began: float = 0.0
    errors: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Fragment:
    """A fragment of the model. parameters: of this fragment. Its exchanges are sent by `send`; `apply`, and then
    `settle` or `put_back`."""

    number: int
    parameters: Sequence[torch.Tensor]
    anchor: FlatWeights = field(init=False)
    momentum: list[torch.Tensor] = field(init=False)
    own: OwnState = field(default_factory=OwnState)
    flight: Flight | None = None
    _applied: _Applied | None = None

    def __post_init__(self) -> None:
        self.anchor = FlatWeights(self.parameters, widen=True)
        self.anchor.fill()
        self.momentum = self.anchor.like()

    def travelling(self) -> Mapping[str, torch.Tensor]:
        """Returns the tensors of the job's state; always the same ones."""
        return {
            **{f"anchor.{self.number}.{i}": flat for i, flat in enumerate(self.anchor.flats)},
            **{f"momentum.{self.number}.{i}": flat for i, flat in enumerate(self.momentum)},
        }

    def gradients(self) -> list[torch.Tensor]:
        """Returns the pseudo-gradients of now, in new memory."""
        weights = FlatWeights(self.parameters, widen=True)
        weights.fill()
        for flat, anchor in zip(weights.flats, self.anchor.flats, strict=True):
            flat.neg_().add_(anchor)
        return weights.flats

    def no_errors(self) -> list[torch.Tensor]:
        """Returns zeros on the host, of the pseudo-gradients' shapes."""
        return [torch.zeros(flat.shape, dtype=torch.float32, device="cpu") for flat in self.anchor.flats]

    @property
    def is_applied(self) -> bool:
        """Whether the weights have the flight's result, provisionally."""
        return self._applied is not None

    def apply(self, outer: OuterStep, alpha: float) -> None:
        """Gives the weights the flight's result, and uses the flight up: it is done."""
        flight = self.flight
        assert flight is not None and self._applied is None
        before, momentum = FlatWeights(self.parameters), self.anchor.like()
        before.fill()
        outer.take(self.anchor.flats, self.momentum, flight.gradients, momentum)
        mixed = FlatWeights(self.parameters, widen=True)
        mixed.fill()
        for own, common in zip(mixed.flats, flight.gradients, strict=True):
            own.mul_(alpha).add_(common, alpha=1 - alpha)
        mixed.write_back()
        self._applied = _Applied(flight, momentum, before)

    def settle(self) -> Flight:
        """Makes the applied result final, with the step that applied it. Returns the flight, which is over."""
        applied, self._applied, self.flight = self._applied, None, None
        assert applied is not None
        self.anchor.take(applied.flight.gradients)
        torch._foreach_copy_(self.momentum, applied.momentum)
        self.own = OwnState(applied.flight.sent, applied.flight.samples, applied.flight.errors)
        return applied.flight

    def put_back(self) -> None:
        """Takes the applied result back, because the step that applied it did not happen. Its generation ends with it,
        and the flight too."""
        applied, self._applied, self.flight = self._applied, None, None
        assert applied is not None
        applied.weights.write_back()
