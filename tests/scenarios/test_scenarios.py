"""The scenarios beside this file, replayed.

REWRITE_SCENARIOS=1 writes down what happens now instead: then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scenario_job import ScenarioJob

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


def replay(text: str) -> str:
    """The same inputs and comments, with the outputs of now."""
    job, lines = ScenarioJob(), []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += job.run(line)
    return "\n".join(lines) + "\n"


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 10


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    now = replay(text)
    if os.environ.get("REWRITE_SCENARIOS") == "1":
        path.write_text(now)
        return
    assert now == text
