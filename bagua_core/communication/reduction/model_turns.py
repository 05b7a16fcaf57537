"""Puts the collectives of several wrapped models in one order on all ranks.

Collectives match by their order alone. With several models that order would follow from the samples of a rank: buckets
of two models that take part in one backward leave as they fill, and a branch that one rank does not take fills none;
and a script may train another model on one rank than on the others. So models take turns. In a backward the model
whose gradient comes first leads: its buckets leave as they fill. Those of any other model leave when the backward has
ended, behind all of the leader's. Each turn begins with a message by which all ranks learn whether they are at the same
model. With one model nothing of this happens.

The message is an alltoall, which nothing else starts where another rank may take a turn: matched with a collective of
another kind it waits, and the ranks are named; Gloo ends a process that gets a message of another size.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.communication.reduction.reduction_place import BackwardsDiffer


class ModelTurns:
    """The wrapped models of one engine, numbered in the order of wrapping."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._next = 0
        self._lock = threading.Lock()  # parameters on several devices: backward runs in several threads
        self._task: int | None = None  # autograd's id of the newest backward
        self._leader = 0  # in it

    def add(self, name: str) -> int:
        """Adds a model that is wrapped now, and returns its number."""
        self._next += 1
        self._names[self._next] = name
        return self._next

    def remove(self, number: int) -> None:
        """Removes a model that is no longer wrapped, on all ranks alike."""
        self._names.pop(number, None)

    def are_needed(self, communicator: Communicator) -> bool:
        return len(self._names) > 1 and communicator.world_size > 1

    def leads(self, number: int) -> bool:
        """Tells whether the model's gradient, which is computed now, is the first of the backward under way."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task != self._task:
                self._task, self._leader = task, number
            return self._leader == number

    def take(self, number: int, communicator: Communicator) -> Turn:
        """Begins a turn of a model. All ranks take a turn here, or one of them raises."""
        return Turn(communicator, number, self._names)


class Turn:
    def __init__(self, communicator: Communicator, number: int, names: dict[int, str]) -> None:
        self._names = names
        own = torch.full((communicator.world_size, 1), number, dtype=torch.int64, device="cpu")
        self._numbers = torch.empty_like(own)
        self.pending = communicator.alltoall(self._numbers, own)

    def check(self) -> None:
        """Raises BackwardsDiffer, on all ranks alike, if they are at different models. `pending` must be done."""
        numbers = self._numbers.flatten().tolist()
        if len(set(numbers)) > 1:
            raise BackwardsDiffer(_explained(numbers, self._names))


def _explained(numbers: Sequence[int], names: dict[int, str]) -> str:
    """Returns the error's text. numbers: by rank."""
    other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
    first, second = (f"model {n} ({names.get(n, 'not wrapped here')})" for n in (numbers[0], numbers[other]))
    return (
        f"rank 0 is at {first} and rank {other} at {second}, in the order in which they were wrapped. All workers must "
        "run the same forwards and backwards of wrapped models in each step; models that take part in one backward are "
        "best wrapped as one module"
    )


class TurnOfBackward:
    """The turn of a reducer in one backward after the other. number: of its model; None: it takes no turns."""

    def __init__(self, turns: ModelTurns, wait: Callable[[Pending], None]) -> None:
        self.number: int | None = None
        self._turns = turns
        self._wait = wait
        self._communicator: Communicator | None = None  # None: no turn has to be taken any more
        self._turn: Turn | None = None
        self._failure: CollectiveFailed | None = None

    def backward_begins(self, communicator: Communicator | None, *, can_lead: bool) -> None:
        """Begins the turn of a backward whose first gradient is computed now, and which ends with a reduction by
        `communicator`, if any. can_lead: its end comes before that of any other model whose first gradient is computed
        later."""
        self._communicator = self._turn = self._failure = None
        number = self.number
        if number is None or communicator is None or not self._turns.are_needed(communicator):
            return
        self._communicator = communicator
        if self._turns.leads(number) and can_lead:
            self._turn = self._turns.take(number, communicator)

    @property
    def is_due(self) -> bool:
        """Whether the turn is still to be taken, before which no bucket may leave."""
        return self._communicator is not None

    @property
    def has_begun(self) -> bool:
        """Whether other ranks know that this one has come to this backward."""
        return self._turn is not None

    def is_taken(self, *, ended: bool) -> bool:
        """Takes the turn, if it is due, waits for the other ranks, and returns whether it is taken.

        False: it is still due. ended: the backward has ended. Raises BackwardsDiffer; `check` raises what else failed.
        """
        if self._communicator is None or self.number is None:
            return True
        if self._failure is not None:
            return False
        if self._turn is None:
            if not ended:
                return False
            self._turn = self._turns.take(self.number, self._communicator)
        try:
            self._wait(self._turn.pending)
        except CollectiveFailed as error:
            self._failure = error
            return False
        self._communicator = None
        self._turn.check()
        return True

    def check(self) -> None:
        """Raises CollectiveFailed if the turn failed."""
        if self._failure is not None:
            raise self._failure


_of_engine: weakref.WeakKeyDictionary[object, ModelTurns] = weakref.WeakKeyDictionary()


def model_turns_of(engine: object) -> ModelTurns:
    """Returns the engine's turns; the first call creates them."""
    found = _of_engine.get(engine)
    if found is None:
        found = _of_engine[engine] = ModelTurns()
    return found
