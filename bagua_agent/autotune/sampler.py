"""Suggests the next point of a study, with a sampler of Optuna's: a program of its own that ends with its answer.

It is a process, since Optuna imports NumPy, which alone is as large as an agent. One argument: a JSON object with
`sizes` (choices of each dimension), `ordered` (whether its choices have an order), `trials` (a point and its rate
each), `tried` (points that are not to be suggested) and `seed`. Prints a JSON object with `point`, or with `exhausted`.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

_ATTEMPTS = 64


def suggest(request: dict[str, Any]) -> list[int] | None:
    """Returns the next point; None if every point was tried."""
    import optuna  # type: ignore[import-not-found,unused-ignore]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = [str(axis) for axis in range(len(request["sizes"]))]
    space: dict[str, Any] = {
        name: optuna.distributions.IntDistribution(0, size - 1)
        if ordered
        else optuna.distributions.CategoricalDistribution(list(range(size)))
        for name, size, ordered in zip(names, request["sizes"], request["ordered"], strict=True)
    }
    tried = {tuple(point) for point in request["tried"]}
    free = [point for point in product(*map(range, request["sizes"])) if point not in tried]
    if not free:
        return None
    sampler = optuna.samplers.TPESampler(seed=request["seed"], multivariate=True, n_startup_trials=4)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for point, rate in request["trials"]:
        parameters = dict(zip(names, point, strict=True))
        study.add_trial(optuna.trial.create_trial(params=parameters, distributions=space, value=rate))
    for _ in range(_ATTEMPTS):
        trial = study.ask(space)
        found = tuple(trial.params[name] for name in names)
        if found not in tried:
            return list(found)
    return list(free[request["seed"] % len(free)])


if __name__ == "__main__":
    point = suggest(json.loads(sys.argv[1]))
    print(json.dumps({"exhausted": True} if point is None else {"point": point}))
