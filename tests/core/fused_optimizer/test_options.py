"""Changes of options that change the update rule are noticed, however they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_core.fused_optimizer.options import SwitchWatch


def groups() -> list[dict[str, Any]]:
    plain = {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "params": [1, 2]}
    return [{**plain, "decay": 0.0, "nested": [1.0, 0.0]}, dict(plain)]


SILENT: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "nothing": lambda g: None,
    "a number": lambda g: g[0].update(lr=0.2),
    "numbers": lambda g: g[1].update(betas=(0.8, 0.98)),
    "a number in a list": lambda g: g[0]["nested"].__setitem__(0, 2.0),
    "parameters": lambda g: g[0]["params"].append(3),
}
SWITCHES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "zero no more": lambda g: g[0].update(decay=0.1),
    "zero in a list": lambda g: g[0]["nested"].__setitem__(0, 0.0),
    "zero in a tuple": lambda g: g[1].update(betas=(0.0, 0.99)),
    "on": lambda g: g[1].update(foreach=True),
    "a tensor": lambda g: g[1].update(lr=torch.tensor(0.1)),
    "another name": lambda g: g[1].update(fused=g[1].pop("foreach")),
    "one more": lambda g: g[1].update(amsgrad=False),
    "one less": lambda g: g[1].pop("foreach"),
    "a group": lambda g: g.append({"params": []}),
    "no group": lambda g: g.clear(),
}


@pytest.mark.parametrize(
    ("change", "with_a_list"),
    [(c, a_list) for c in (*SILENT, *SWITCHES) for a_list in (True, False) if a_list or "list" not in c],
)
def test_a_change_is_noticed_until_it_is_taken(change: str, with_a_list: bool) -> None:
    now = groups()
    if not with_a_list:
        del now[0]["nested"]
    watch = SwitchWatch()
    assert watch.has_changed(now)
    watch.take(now)
    assert not watch.has_changed(now)
    (SILENT | SWITCHES)[change](now)
    for _ in range(2):
        assert watch.has_changed(now) == (change in SWITCHES)
    watch.take(now)
    assert not watch.has_changed(now)
