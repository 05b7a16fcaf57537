"""The units of deploy/systemd bound what their services may take."""

from __future__ import annotations

from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deploy/systemd"


def settings(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda path: path.stem)
def test_memory_and_tasks_are_bounded(unit: Path) -> None:
    found = settings(unit.read_text())
    assert found["MemoryMax"].removesuffix("G").isdigit() and found["MemoryMax"].endswith("G")
    assert found["TasksMax"].isdigit()
    assert found["Restart"] == "always", "what was ended for its memory comes back"


def test_there_are_units() -> None:
    assert {unit.stem for unit in UNITS.glob("*.service")} == {"bagua-agent", "bagua-etcd"}
