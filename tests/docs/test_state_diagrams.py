"""The state diagrams in docs/design/ equal the transition tables in the code.

REWRITE_DIAGRAMS=1 writes them anew instead: then read the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from bagua_core.elastic.step import step_states

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design"


def mermaid(transitions: Mapping[tuple[Enum, Enum], Enum], start: Enum) -> str:
    """A state diagram of the table, in the order of the table."""
    states = list(
        dict.fromkeys(state for (before, _), after in transitions.items() for state in (before, after))
    )
    lines = ["stateDiagram-v2"]
    lines += [f"    {state.name}: {state.value}" for state in states]
    lines += [f"    [*] --> {start.name}"]
    lines += [
        f"    {before.name} --> {after.name}: {event.value}" for (before, event), after in transitions.items()
    ]
    return "\n".join(lines)


def with_diagram(document: str, name: str, diagram: str) -> str:
    """`document` with the block between the marks of `name` replaced. Raises ValueError if it has no such block."""
    begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
    block = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(block.findall(document)) != 1:
        raise ValueError(f"the document has not exactly one block {begin.strip()!r}")
    return block.sub(lambda _: f"{begin}```mermaid\n{diagram}\n```\n{end}", document)


def test_the_diagram_of_a_step_is_the_table() -> None:
    path = DESIGN / "steps.md"
    document = path.read_text()
    diagram = mermaid(step_states.TRANSITIONS, step_states.StepStates().phase)
    current = with_diagram(document, "bagua_core/elastic/step/step_states.py", diagram)
    if os.environ.get("REWRITE_DIAGRAMS") == "1":
        path.write_text(current)
        return
    assert current == document, "stale: run this test with REWRITE_DIAGRAMS=1 and read the difference"


def test_every_state_of_a_step_is_in_the_table() -> None:
    reached = {s for (before, _), after in step_states.TRANSITIONS.items() for s in (before, after)}
    assert reached == set(step_states.Phase)
