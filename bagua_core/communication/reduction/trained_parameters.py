"""Records which of a model's parameters this rank trains, and finds out whether all ranks train the same ones.

A choice is one byte per parameter of the wrapped module, in its order: 1 if it requires a gradient. A rank with another
choice than all ranks last agreed on says so in the next reduction. Then all ranks exchange their choices, and agree or
raise alike.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.errors import UserError

Candidates = Sequence[tuple[str, torch.nn.Parameter]]
NAMES_SHOWN = 5


class TrainedParametersDiffer(UserError, RuntimeError):
    """Ranks froze or unfroze different parameters of one model."""


class FrozenWithinStep(UserError, RuntimeError):
    """Parameters were frozen or unfrozen between micro-batches of one step."""


class CannotTakeOn(UserError, RuntimeError):
    """Parameters were unfrozen that the model's algorithm does not know."""


class TrainedParameters:
    """Records the parameters that this rank trains, and those that all ranks agreed on. candidates: all parameters of
    the module, by name."""

    def __init__(
        self, is_attached: Callable[[Sequence[torch.nn.Parameter]], bool], takes_new: bool = True
    ) -> None:
        """Begins without a choice.

        is_attached: tells whether these are the parameters that the model was wrapped with. takes_new: whether the
        script's own algorithm can take on others. It comes back when settings put another in its place for a while.
        """
        self.takes_new = takes_new
        self._is_attached = is_attached
        self.candidates: Candidates = ()
        self.choice: bytes | None = None
        """Of this rank, at the last forward; None: there was none in this generation."""
        self.agreed: bytes | None = None
        """Of all ranks; None: the parameters that the model was wrapped with."""
        self.differs = False
        """Whether `choice` is another than `agreed`."""

    def forget(self) -> None:
        """Forgets the choices for another generation: all ranks begin with the parameters that the model was wrapped
        with."""
        self.choice = self.agreed = None
        self.differs = False

    def chosen(self, choice: bytes) -> list[torch.nn.Parameter]:
        return [p for (_, p), trained in zip(self.candidates, choice, strict=True) if trained]

    def choose(self, choice: bytes) -> None:
        self.choice = choice
        if self.agreed is None:
            self.differs = not self._is_attached(self.chosen(choice))
        else:
            self.differs = choice != self.agreed

    def changed(self, choice: bytes) -> list[str]:
        """Returns the names of the parameters for which `choice` is not the last one."""
        if self.choice is None:
            return []
        return [
            name
            for (name, _), now, was in zip(self.candidates, choice, self.choice, strict=True)
            if now != was
        ]

    def names_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[str]:
        return [name for name, candidate in self.candidates if any(candidate is p for p in parameters)]

    def agree(self, communicator: Communicator, wait: Callable[[Pending], None]) -> None:
        """Exchanges the choices of all ranks, which all call this if one of them differs. Raises
        TrainedParametersDiffer, on all of them."""
        choice = self.choice
        if choice is None:
            choice = bytes(p.requires_grad for _, p in self.candidates)
        own = torch.tensor(list(choice), dtype=torch.uint8, device="cpu")
        rows = torch.empty(communicator.world_size, len(choice), dtype=torch.uint8, device="cpu")
        wait(communicator.allgather(rows, own))
        text = difference([bytes(row) for row in rows.tolist()], [name for name, _ in self.candidates])
        if text is not None:
            raise TrainedParametersDiffer(text)
        self.agreed = choice
        self.differs = False


def difference(choices: Sequence[bytes], names: Sequence[str]) -> str | None:
    """Returns the error's text, or None if all ranks chose alike. choices: by global rank."""
    first = choices[0]
    for rank, choice in enumerate(choices):
        if choice == first:
            continue
        more = [name for name, mine, its in zip(names, first, choice, strict=True) if mine and not its]
        less = [name for name, mine, its in zip(names, first, choice, strict=True) if its and not mine]
        parts = [f"rank 0 trains {listed(more)} and rank {rank} has them frozen"] if more else []
        parts += [f"rank {rank} trains {listed(less)} and rank 0 has them frozen"] if less else []
        return (
            f"{'; '.join(parts)}. Freeze and unfreeze parameters at a step boundary and on all workers alike; a worker "
            "that joins must come to the same choice as the others"
        )
    return None


def check_known(candidates: Candidates, choice: bytes, known: Container[int]) -> None:
    """Checks that an algorithm which takes on no further parameters knows all those of `choice`. known: their ids.
    Raises CannotTakeOn."""
    new = [
        name for (name, p), trained in zip(candidates, choice, strict=True) if trained and id(p) not in known
    ]
    if new:
        raise CannotTakeOn(
            f"{listed(new)}: these parameters were frozen when the model was wrapped, and its algorithm cannot take "
            "them on later. Wrap the model first and freeze them after that"
        )


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
