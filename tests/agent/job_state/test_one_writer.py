"""The state of a job is changed by its own methods alone."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import bagua_agent
from bagua_agent.job_state import job_state
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.membership.view import JobView
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind

FIELDS = {one.name for one in fields(LocalJobState)}
HOLDERS = {"seen", "_seen"}  # the names under which parts of the agent hold the state
IN_PLACE = {
    "add",
    "append",
    "clear",
    "CopyFrom",
    "discard",
    "extend",
    "pop",
    "popitem",
    "setdefault",
    "update",
}


def _is_of_the_state(node: ast.expr) -> bool:
    """Whether the expression is a field of the state, or a part of one."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        holder = node.value
        name = (
            holder.attr
            if isinstance(holder, ast.Attribute)
            else holder.id
            if isinstance(holder, ast.Name)
            else ""
        )
        if isinstance(node, ast.Attribute) and node.attr in FIELDS and name in HOLDERS:
            return True
        node = holder
    return False


def changes_of_the_state(source: str) -> list[int]:
    """Returns the lines that assign or delete a field of the state, or change one in place."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed: ast.expr = node
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE
        ):
            changed = node.func.value
        else:
            continue
        if _is_of_the_state(changed):
            lines.append(node.lineno)
    return lines


def test_no_other_module_changes_the_state() -> None:
    folder = Path(bagua_agent.__file__).parent
    own = Path(job_state.__file__)
    found = {
        str(path.relative_to(folder)): lines
        for path in sorted(folder.rglob("*.py"))
        if path != own and (lines := changes_of_the_state(path.read_text()))
    }
    assert not found


def test_the_search_finds_each_kind_of_change() -> None:
    for change in (
        "job.seen.closing = True",
        "self._seen.generation_revision += 1",
        "seen.spec.mode = 1",
        "self._job.seen.waits['w'] = 3",
        "del seen.waits['w']",
        "seen.remembered.pop(key, None)",
        "seen.whole, other = True, 1",
    ):
        assert changes_of_the_state(change) == [1], change
    for reading in (
        "view = job.seen.view",
        "seen.take_leader(None)",
        "self._view.closing = True",
        "f(seen.waits.get(w))",
    ):
        assert not changes_of_the_state(reading), reading


def test_collections_are_replaced_so_that_a_reader_keeps_what_it_read() -> None:
    state = LocalJobState(pb.JobSpec(), JobView())
    state.remember("key", b"value")
    state.take_unreadable("key", 3)
    state.worker_waits("w", 2)
    state.take_generation(Generation(2, 1, GenerationKind.FAILOVER, (), "nonce"))
    read = (state.remembered, state.unreadable, state.waits, state.generations)
    state.forget("key")
    state.take_readable("key")
    state.worker_waits_no_more("w")
    state.worker_waits_no_more("w")  # nothing is left to forget
    state.take_generation(Generation(3, 2, GenerationKind.FAILOVER, (), "nonce"))
    assert read == ({"key": b"value"}, {"key": 3}, {"w": 2}, {"failover": 1})
    assert (state.remembered, state.unreadable, state.waits, state.generations) == (
        {},
        {},
        {},
        {"failover": 2},
    )
