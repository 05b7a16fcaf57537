"""What each drawn feature changes in one plain process: a feature without an effect would compare nothing.

`python -m tests.differential.effects short` prints, for the seeds of the short form, the features that change nothing,
each choice in the first seed that has it;
`python -m tests.differential.effects FIELD=CHOICE ...` does so for these, whether they fit together or not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # see lanes.py

from tests.differential import compare, short_form
from tests.differential.features import Features, draw
from tests.differential.worker import Part, prepare, state_file

# The loader's own process gives the same samples.
WITHOUT_EFFECT = {"loop=loader_process"}
# What a feature leaves behind that changes nothing else.
OF_ITS_OWN = {
    "average": ("model net.average_", "registered average."),
    "buffers": "model net.forwards",
    "evaluation": "registered best.value",
    "inside": "registered losses.value",
}
# Not features, but sizes.
SIZES = {"seed", "batch", "batches", "epochs"}


def outcome(f: Features) -> dict[str, Any] | None:
    """The final state of one plain process, and how often its loop's body ran; None if the script fails."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        process = prepare(Part("plain", 0, f, (), None, directory))
        process.open_gate()
        _, status = os.waitpid(process.pid, 0)
        os.close(process.gate)
        os.close(process.pidfd)
        process.hooks.close()
        if status:
            return None
        left: dict[str, Any] = torch.load(state_file(directory, "plain"))
    return {**left["state"], "bodies": left["bodies"]}


def without_effect(f: Features, tried: set[str]) -> list[str]:
    """Of the features of `f`, those without which the script does the same. tried: choices to pass over; gets more."""
    whole, plain = outcome(f), Features(f.seed)
    if whole is None:
        return ["all of them: the script fails"]
    found = []
    for field in fields(f):
        value = getattr(f, field.name)
        if field.name in SIZES or value == getattr(plain, field.name) or f"{field.name}={value}" in tried:
            continue
        tried.add(f"{field.name}={value}")
        lacking = outcome(replace(f, **{field.name: getattr(plain, field.name)}))
        # a script that can't do without it is another one too
        if lacking is not None and not _differ(field.name, whole, lacking):
            found.append(f"{field.name}={value}")
    return [name for name in found if name not in WITHOUT_EFFECT]


def _differ(name: str, whole: dict[str, Any], lacking: dict[str, Any]) -> bool:
    """Values that only one of them has count where they are what the feature is for."""
    common = whole.keys() & lacking.keys()
    if any(compare.largest_difference({p: whole[p]}, {p: lacking[p]}) for p in common):
        return True
    more = [p for p in whole.keys() - common if p.startswith(OF_ITS_OWN.get(name, "-"))]
    return any(bool(torch.as_tensor(whole[p]).any()) for p in more)


def main() -> None:
    torch.set_num_threads(1)
    if "=" in sys.argv[1]:
        assigned = dict(argument.split("=") for argument in sys.argv[1:])
        drawn = [replace(Features(1), **assigned)]  # type: ignore[arg-type]
    else:
        assert sys.argv[1] == "short", sys.argv
        drawn = [draw(seed) for seed in short_form.seeds()]
    tried = set[str]()
    for f in drawn:
        for name in without_effect(f, tried):
            print(f"{f.seed}: {name} of {' '.join(f.names)}", flush=True)


if __name__ == "__main__":
    main()
