"""Chooses the seeds of the short form: few that show every choice of a feature, and faults together with each.

A seed costs about as much as it has workers, and most of what a further one shows others have shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

from tests.differential import features, history

KINDS = ("kill", "join", "leave")
RESUMED = {"resumed by more", "resumed by fewer"}
_DRAWN_FROM = range(400)


@cache
def shown_by(seed: int) -> frozenset[str]:
    """Each choice of a feature, alone and with each kind of event that happens."""
    f = features.draw(seed)
    happened = history.draw(seed, f)
    names = [f"{name}={getattr(f, name)}" for name in features.CHOICES]
    if f.dtype == "bfloat16":
        names.append(f"{f.optimizer} in bfloat16")
    kinds = {event.kind for event in happened.events}
    found = {*names, *(f"{name}, {kind}" for name in names for kind in kinds)}
    if happened.resumed_by:
        found.add(f"resumed by {'more' if happened.resumed_by > happened.first else 'fewer'}")
    return frozenset(found)


def counted(seeds: Iterable[int]) -> Counter[str]:
    """How many of the seeds show each."""
    return Counter(shown for seed in seeds for shown in shown_by(seed))


def choices() -> set[str]:
    """Every choice that can be drawn, by name."""
    drawn = {f"{name}={choice}" for name, of_name in features.CHOICES.items() for choice, _ in of_name}
    return drawn | {"nadam in bfloat16", "master in bfloat16"}


def wanted() -> set[str]:
    """What the short form shows: every choice, and each with each kind of event, but for the many optimizers."""
    with_events = {name for name in choices() if not name.startswith("optimizer=")}
    return choices() | RESUMED | {f"{name}, {kind}" for name in with_events for kind in KINDS}


@cache
def seeds() -> tuple[int, ...]:
    """Raises ValueError if something that is wanted is never drawn."""
    missing, chosen = wanted(), set[int]()
    while missing:
        best = max(_DRAWN_FROM, key=lambda seed: len(shown_by(seed) & missing) / _cost(seed))
        if not shown_by(best) & missing:
            raise ValueError(f"no seed of {_DRAWN_FROM} shows {sorted(missing)}")
        missing -= shown_by(best)
        chosen.add(best)
    return tuple(sorted(chosen))


@cache
def _cost(seed: int) -> int:
    """Processes of a seed, the plain one too."""
    happened = history.draw(seed, features.draw(seed))
    return 1 + happened.workers + (happened.first if happened.resumed_by else 0)
