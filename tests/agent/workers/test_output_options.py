"""The flags' texts, and what becomes of each stream."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.workers.output.log_layout import LogLayout, open_log_dir, path_component
from bagua_agent.workers.output.output_options import (
    OutputOptions,
    Streams,
    parse_filters,
    parse_slots,
    parse_streams,
)


def test_the_files_of_a_worker_are_shown_in_utf8(tmp_path: Path) -> None:
    layout = LogLayout(tmp_path / os.fsdecode(b"caf\xe9"), "job", "node")
    files = layout.make_worker_directory(0, "w")
    assert files.shown == ""
    files.stderr.touch()
    assert files.shown == rf"{tmp_path}/caf\udce9/job/node/slot0-w"


@pytest.mark.parametrize(
    ("text", "by_slot"),
    [
        ("0", [0, 0, 0]),
        ("3", [3, 3, 3]),
        ("0:1,1:2", [1, 2, 0]),
        ("1:3", [0, 3, 0]),
        ("12:1,2:2", [0, 0, 2]),
    ],
)
def test_streams(text: str, by_slot: list[int]) -> None:
    choice = parse_streams("--tee", text)
    assert [choice.of(slot) for slot in range(3)] == by_slot


@pytest.mark.parametrize("text", ["", "4", "-1", "0:4", "0:1,", "a", "0=1", "0:1;1:2"])
def test_streams_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match="--redirects"):
        parse_streams("--redirects", text)


def test_slots() -> None:
    assert parse_slots("--local-ranks-filter", "") is None
    assert parse_slots("--local-ranks-filter", "0, 2") == frozenset({0, 2})
    with pytest.raises(UserError, match="'x' is not a local rank"):
        parse_slots("--local-ranks-filter", "0,x")


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("", ()),
        ("a,b", ("a", "b")),
        ("a,,b", ("a,b",)),
        ("a,,b,c", ("a,b", "c")),
        ("a,", ("a",)),
        ("a,,,b", ("a,", "b")),
    ],
)
def test_filters(text: str, filters: tuple[str, ...]) -> None:
    assert parse_filters(text) == filters


@pytest.mark.parametrize(
    ("redirects", "tee", "shown", "file", "terminal"),
    [
        ("0", "0", "", False, True),
        ("1", "0", "", True, False),
        ("0", "1", "", True, True),
        ("1", "1", "", True, True),
        ("2", "2", "", False, True),
        ("0", "1", "5", True, False),
        ("0", "0", "5", False, False),
    ],
)
def test_plan_of_stdout(redirects: str, tee: str, shown: str, file: bool, terminal: bool) -> None:
    options = OutputOptions.parse(redirects=redirects, tee=tee, local_ranks_filter=shown)
    plan = options.plan(0, Streams.OUT)
    assert (plan.file, plan.terminal) == (file, terminal)


@pytest.mark.parametrize(
    ("redirects", "shown", "slots", "several"),
    [("0", "", 1, False), ("0", "", 2, True), ("0", "1", 4, False), ("3", "", 4, False), ("1", "", 2, True)],
)
def test_several_writers(redirects: str, shown: str, slots: int, several: bool) -> None:
    options = OutputOptions.parse(redirects=redirects, local_ranks_filter=shown)
    assert options.shows_several(slots) is several


@pytest.mark.parametrize(
    ("flags", "inherits"),
    [
        ({}, True),
        ({"redirects": "2"}, True),
        ({"redirects": "1"}, False),
        ({"tee": "1"}, False),
        ({"local_ranks_filter": "1"}, False),
        ({"duplicate_stdout_filters": "loss"}, False),
        ({"labels": True}, False),
    ],
)
def test_a_stream_that_nothing_reads_is_inherited(flags: dict[str, Any], inherits: bool) -> None:
    assert OutputOptions.parse(**flags).inherits(0, Streams.OUT) is inherits


def test_only_teed_lines_are_tagged() -> None:
    options = OutputOptions.parse(tee="1", role="trainer")
    assert options.tag(1, 5, "n") == "[trainer1]:"
    assert options.is_tagged(1, Streams.OUT) and not options.is_tagged(1, Streams.ERR)
    template = OutputOptions.parse(role="trainer", prefix_template="${role_name} ${rank} ${local_rank} $x|")
    assert template.tag(1, 5, "n") == "trainer 5 1 $x|"
    assert OutputOptions.parse(labels=True).tag(1, 5, "n") == "[n:1]: "


def test_layout(tmp_path: Path) -> None:
    layout = LogLayout(tmp_path, "job", "node-1")
    files = layout.make_worker_directory(2, "w7")
    assert files.error == tmp_path / "job" / "node-1" / "slot2-w7" / "error.json"
    assert files.directory.is_dir()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="not a directory"):
        open_log_dir(str(file))
    assert open_log_dir(None).is_dir()


@pytest.mark.parametrize(
    ("text", "safe"), [("a/b", "a_b"), ("..", "_.."), ("", "_"), ("../x", ".._x"), ("ok-1.2", "ok-1.2")]
)
def test_names_stay_in_their_directory(text: str, safe: str) -> None:
    assert path_component(text) == safe
