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
BARE_LOOP = "loop=next_step"
"""Its steps begin with a forward of the script, not with a draw of the loader, and whatever may come before that
forward (an optimizer's closure, a second model) decides there: each choice is shown in this loop too."""
_DRAWN_FROM = range(400)


@cache
def shown_by(seed: int) -> frozenset[str]:
    """Each choice of a feature, alone, with each kind of event that happens, and in BARE_LOOP."""
    f = features.draw(seed)
    happened = history.draw(seed, f)
    names = [f"{name}={getattr(f, name)}" for name in features.CHOICES]
    if f.dtype == "bfloat16":
        names.append(f"{f.optimizer} in bfloat16")
    kinds = {event.kind for event in happened.events}
    found = {*names, *(f"{name}, {kind}" for name in names for kind in kinds)}
    if BARE_LOOP in names:
        found.update(f"{BARE_LOOP} with {name}" for name in names if name != BARE_LOOP)
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
    """What the short form shows: every choice, each with each kind of event, but for the many optimizers, and each that
    can be drawn with BARE_LOOP in that loop."""
    with_events = {name for name in choices() if not name.startswith("optimizer=")}
    in_bare_loop = {
        shown for seed in _DRAWN_FROM for shown in shown_by(seed) if shown.startswith(f"{BARE_LOOP} with")
    }
    return choices() | RESUMED | {f"{name}, {kind}" for name in with_events for kind in KINDS} | in_bare_loop


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
