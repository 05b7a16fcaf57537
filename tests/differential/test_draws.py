"""The seeds that the differential tests run draw every feature, and faults together with each."""

from __future__ import annotations

from collections import Counter

from tests.differential import features, history
from tests.differential.test_differential import LONG_SEEDS, SHORT_SEEDS, said

# The short form has too few seeds for every optimizer.
IN_THE_SHORT_FORM = {
    f"{name}={choice}"
    for name, choices in features.CHOICES.items()
    for choice, _ in choices
    if name != "optimizer"
} | {"nadam in bfloat16", "master in bfloat16", "resumed by more", "resumed by fewer"}


def counted(seeds: int) -> Counter[str]:
    """How many seeds have each choice of a feature, alone and in a history with a loss or a newcomer."""
    found = Counter[str]()
    for seed in range(seeds):
        f = features.draw(seed)
        happened = history.draw(seed, f)
        names = [f"{name}={getattr(f, name)}" for name in features.CHOICES]
        if f.dtype == "bfloat16":
            names.append(f"{f.optimizer} in bfloat16")
        kinds = {event.kind for event in happened.events}
        found.update(names)
        found.update(f"{name}, {kind}" for name in names for kind in kinds)
        if happened.resumed_by:
            found[f"resumed by {'more' if happened.resumed_by > happened.first else 'fewer'}"] += 1
    return found


def test_the_short_form_draws_every_choice() -> None:
    found = counted(SHORT_SEEDS)
    assert not {name for name in IN_THE_SHORT_FORM if not found[name]}


def test_the_long_form_draws_every_choice_with_losses_newcomers_and_leaves() -> None:
    found = counted(LONG_SEEDS)
    choices = {f"{name}={choice}" for name, of_name in features.CHOICES.items() for choice, _ in of_name}
    wanted = choices | IN_THE_SHORT_FORM
    assert not {name for name in wanted if found[name] < 20}
    changed = wanted - {"resumed by more", "resumed by fewer"}
    kinds = ("kill", "join", "leave")
    assert not {f"{name}, {kind}" for name in changed for kind in kinds if found[f"{name}, {kind}"] < 2}


def without_effect(*arguments: str) -> list[str]:
    return said("tests.differential.effects", *arguments, limit_s=600.0)


def test_every_drawn_feature_changes_what_the_script_does() -> None:
    assert not without_effect("0:20")


def test_a_feature_that_never_runs_is_found() -> None:
    """Nothing lies between two steps of a loop without a loader."""
    (found,) = without_effect("loop=next_step", "evaluation=allreduce")
    assert "evaluation=allreduce" in found
