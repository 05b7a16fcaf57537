"""Any history of joins, leaves and losses gives what one plain process gives, within rounding.

Each seed draws a script's features and a history of workers. compare.py says what is compared and how exactly. A seed
that fails is run again with `python -m tests.differential --seeds SEED --verbose`.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.differential import every_draw, short_form
from tests.differential.sabotage import SABOTAGE
from tests.differential.seed import SeedVerdict
from tests.lab import zygote
from tests.lab.launched import ROOT, environment

LONG_SEEDS = 1000


def said(module: str, *arguments: str, limit_s: float) -> list[str]:
    """What `python -m module` prints, its errors too. In a process of its own, for seeds are forked from one without
    threads; and forked, for it would import torch again."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "said")
        words = [sys.executable, "-m", module, *arguments]
        code = zygote.run(words, environment(), output, ROOT, limit_s)
        text = output.read_text(errors="replace")
    assert code == 0, text[-4000:]
    return text.splitlines()


def verdicts(module: str, *arguments: str, limit_s: float) -> list[SeedVerdict]:
    lines = said(module, *arguments, limit_s=limit_s)
    return [SeedVerdict.decode(line.encode()) for line in lines if line.startswith("{")]


def check(found: list[SeedVerdict], count: int) -> None:
    failed = [v for v in found if v.problems]
    assert not failed, "\n".join(v.line for v in failed) + "\n" + failed[0].logs
    assert len(found) == count


def test_drawn_histories_give_what_a_plain_process_gives() -> None:
    found = verdicts("tests.differential", "--json", "--seeds", "short", limit_s=600.0)
    check(found, len(short_form.seeds()))
    events = " ".join(v.history for v in found)
    assert all(word in events for word in ("kill", "join", "leave", "resume")), events


def test_gradients_of_earlier_draws_survive_a_loss_in_draws_that_differ() -> None:
    check(verdicts("tests.differential.every_draw", limit_s=600.0), len(every_draw.cases(every=False)))


@pytest.mark.parametrize(
    "happened",
    [
        "3 workers; kill w1 reduction.before@1",
        "2 workers; join w2 step@5",
        "2 workers; all killed @6 settled, 1 resume",
    ],
    ids=["loss", "join", "resume"],
)
def test_an_optimizer_may_step_before_its_step_has_reduced_anything(happened: str) -> None:
    """A lost update, a copy of the state that the optimizer waits for and that waits for a reduction, and a checkpoint
    without gradients that the next step's optimizer uses."""
    late = ("--seeds", "7", "--only", "--feature", "momentum", "--feature", "update=late")
    check(verdicts("tests.differential", "--json", *late, "--history", happened, limit_s=120.0), 1)


@pytest.mark.long  # every other draw repeats the place in a step and an epoch of one of those above
def test_gradients_of_earlier_draws_survive_a_loss_in_every_draw() -> None:
    found = verdicts("tests.differential.every_draw", "all", limit_s=1200.0)
    check(found, len(every_draw.cases(every=True)))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, LONG_SEEDS, 250))
def test_many_drawn_histories(first: int) -> None:
    seeds = f"{first}:{first + 250}"
    check(verdicts("tests.differential", "--json", "--seeds", seeds, limit_s=1800.0), 250)


@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_broken_on_purpose_is_there(name: str) -> None:
    """A name that the code has no more would be set without an effect, and only --long would tell."""
    lines = ast.parse(SABOTAGE[name].before).body
    names: dict[str, Any] = {}
    exec(compile(ast.Module([n for n in lines if isinstance(n, ast.Import)], []), name, "exec"), names)
    replaced = [
        t for n in lines if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Attribute)
    ]
    assert replaced
    for target in replaced:
        owner = eval(ast.unparse(target.value), names)
        assert hasattr(owner, target.attr), f"{ast.unparse(target)} is gone"


@pytest.fixture(scope="module")
def broken() -> dict[str, tuple[SeedVerdict, SeedVerdict]]:
    """By name: the verdict on the whole code, and on the code that is broken."""
    found = iter(verdicts("tests.differential.sabotage", limit_s=600.0))
    return {name: (next(found), next(found)) for name in SABOTAGE}


@pytest.mark.long
@pytest.mark.parametrize("name", SABOTAGE)
def test_it_fails_without(name: str, broken: dict[str, tuple[SeedVerdict, SeedVerdict]]) -> None:
    whole, without = broken[name]
    assert not whole.problems, whole.line
    assert SABOTAGE[name].problem in "; ".join(without.problems), without.line
