"""Cuts a model into fragments, and decides when the exchange of a fragment is sent and applied. Pure.

Every worker must decide alike, so a decision depends on the step, the fragment's clock and the step in which the
exchange under way was sent, all of which are equal on all workers, and never on time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """The actions of a fragment as a step begins."""

    NOTHING = "nothing"
    SEND = "send"
    APPLY = "apply"


@dataclass(frozen=True, slots=True)
class DueAction:
    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps in which fragments are exchanged. sync_every: steps between two exchanges of a fragment. count: of
    fragments. delay: steps from sending to applying, below sync_every."""

    sync_every: int
    count: int
    delay: int

    def offset(self, fragment: int) -> int:
        """Returns the place of the fragment's exchanges among the steps of a round: evenly divided, so that traffic
        is."""
        return fragment * self.sync_every // self.count

    def decide(self, fragment: int, step: int, clock: int, sent: int | None) -> DueAction:
        """Returns what `fragment` does as `step` begins. clock: the step in which its last applied exchange was sent.
        sent: the step in which the exchange under way was; None: there is none."""
        if sent is not None:
            if step - sent >= self.delay:
                return DueAction(Action.APPLY, f"sent in step {sent}, {self.delay} steps ago or more")
            return DueAction(
                Action.NOTHING, f"sent in step {sent}, to be applied in step {sent + self.delay}"
            )
        offset = self.offset(fragment)
        if (step - offset) // self.sync_every > (clock - offset) // self.sync_every:
            return DueAction(Action.SEND, f"due since the exchange of step {clock}")
        return DueAction(Action.NOTHING, f"not due: its last exchange was sent in step {clock}")


def cut(sizes_bytes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Divides tensors of these sizes into `count` fragments of about equal size; fewer if there are fewer tensors.

    Each tensor goes whole, in order of falling size, into the fragment that is smallest so far. Returns the indices of
    each fragment's tensors, ascending; no fragment is empty.
    """
    fragments: list[list[int]] = [[] for _ in range(min(count, len(sizes_bytes)))]
    filled = [0] * len(fragments)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        # by the number of tensors too: fragments must not stay empty for tensors without elements
        smallest = min(range(len(fragments)), key=lambda f: (filled[f], len(fragments[f]), f))
        fragments[smallest].append(index)
        filled[smallest] += sizes_bytes[index]
    return tuple(tuple(sorted(fragment)) for fragment in fragments)


def shares_of(weights: Sequence[float]) -> list[float]:
    """Returns what each worker's pseudo-gradient counts in the mean; the shares sum to 1. If no worker has a weight,
    all count alike: none has learned anything since the round began."""
    total = sum(weights)
    if not total > 0:
        return [1 / len(weights)] * len(weights)
    return [weight / total for weight in weights]
