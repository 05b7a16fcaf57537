"""The seeds that the differential tests run draw every feature, and faults together with each."""

from __future__ import annotations

import pytest

from tests.differential import short_form
from tests.differential.short_form import KINDS, choices, counted
from tests.differential.test_differential import LONG_SEEDS, said


def test_the_short_form_draws_every_choice_and_each_but_the_optimizers_with_all_events() -> None:
    found = counted(short_form.seeds())
    assert not {name for name in choices() if not found[name]}
    changed = {name for name in choices() if not name.startswith("optimizer=")}
    assert not {f"{name}, {kind}" for name in changed for kind in KINDS if not found[f"{name}, {kind}"]}
    assert all(
        found[f"{short_form.BARE_LOOP} with {name}"]
        for name in ("optimizer=lbfgs", "parts=gan", "sharpness=sam")
    )


def test_the_long_form_draws_every_choice_with_losses_newcomers_and_leaves() -> None:
    found = counted(range(LONG_SEEDS))
    assert not {name for name in choices() | short_form.RESUMED if found[name] < 20}
    assert not {f"{name}, {kind}" for name in choices() for kind in KINDS if found[f"{name}, {kind}"] < 2}


def without_effect(*arguments: str) -> list[str]:
    return said("tests.differential.effects", *arguments, limit_s=600.0)


@pytest.mark.long  # of the draws, which change rarely, and not of the package
def test_every_drawn_feature_changes_what_the_script_does() -> None:
    assert not without_effect("short")


def test_a_feature_that_never_runs_is_found() -> None:
    """Nothing lies between two steps of a loop without a loader."""
    (found,) = without_effect("loop=next_step", "evaluation=allreduce")
    assert "evaluation=allreduce" in found
