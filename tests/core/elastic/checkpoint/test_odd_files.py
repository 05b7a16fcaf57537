"""Unexpected files in a checkpoint directory neither block nor raise; one line names each."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagua_core.elastic.checkpoint import catalogue, part_file, restore
from bagua_core.elastic.checkpoint.catalogue import Run, RunState, UnreadableRun
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.part_file import CorruptPart, Header
from tests.core.elastic.checkpoint.test_checkpoint_parts import PLACE, part_of, read, whole
from tests.core.elastic.state.trainings import Training


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name(".fifo"))
    path.symlink_to(path.with_name(".fifo"))


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def directory(path: Path) -> None:
    path.mkdir()


ODD: list[Callable[[Path], None]] = [fifo, link_to_a_fifo, zeros, a_socket, huge, directory]
TEXTS = [
    "",
    "[]",
    "null",
    "{}",
    '{"resumed_at_step": null}',
    '{"resumed_at_step": 1e999}',
    "[" * 100_000,
    "\xff",
]


@pytest.mark.parametrize("make", ODD)
def test_an_odd_file_in_place_of_a_runs_is_named_at_once(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    catalogue.write_run(LocalStorage(tmp_path), Run(1, 0), "job")
    make(tmp_path / "run-0002.json")
    with pytest.raises(restore.CheckpointsUnreadable, match=r"run-0002\.json") as error:
        restore.choose(LocalStorage(tmp_path), "job", frozenset(), print)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", TEXTS)
def test_an_odd_text_of_a_run_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run-0002.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UnreadableRun, match=r"run-0002\.json"):
        catalogue.runs(LocalStorage(tmp_path))
    with pytest.raises(restore.CheckpointsUnreadable, match=r"run-0002\.json"):
        restore.choose(LocalStorage(tmp_path), "job", frozenset(), print)


@pytest.mark.parametrize("make", ODD)
def test_an_odd_file_in_place_of_a_part_makes_its_checkpoint_not_count(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    paths = whole(tmp_path, Training("adam", 0))
    paths[1].unlink()
    make(paths[1])
    (found,) = catalogue.find(LocalStorage(tmp_path))
    assert not found.is_complete and paths[1].name in found.reason


def test_files_of_others_beside_the_parts_do_not_count(tmp_path: Path) -> None:
    training = Training("adam", 0)
    paths = whole(tmp_path, training)
    os.mkfifo(paths[0].with_name("notes"))
    (found,) = catalogue.find(LocalStorage(tmp_path))
    assert found.is_complete
    assert read(tmp_path, training).step == PLACE.name.step


def rewrite(path: Path, **changed: Any) -> None:
    """Another header, with the checksum that fits it. The key "table" is of tensors' entries."""
    data = path.read_bytes()
    rest = 8 + int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8:rest]), **changed.pop("table", {})}
    values = {**json.loads(header["__metadata__"]["bagua"]), **changed}
    header["__metadata__"] = {"checksum": "", "bagua": json.dumps(values)}
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(part_file.with_checksum(text) + data[rest:])


@pytest.mark.parametrize(
    "changed",
    [
        {"manifest_crc": "1"},
        {"manifest_crc": -1},
        {"part": None},
        {"parts": 1 << 70},
        {"parts": 0},
        {"pieces": 5},
        {"format": 1},
        {"table": {"another": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}},
        {"table": {"another": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}},
        {"table": {"another": {"dtype": "F32", "shape": [1], "data_offsets": ["a", "b"]}}},
        {"table": {"another": {"dtype": "F32", "shape": 4, "data_offsets": [0, 4]}}},
        {"table": {"another": []}},
        {"table": {"another": None}},
        {"name": [1, 2, "3"]},
        {"name": 4},
        {"position": None},
        {"fingerprint": []},
        {"job": 5},
        {"run": True},
        {"digest": "x"},
    ],
)
def test_a_header_of_odd_values_is_corrupt(tmp_path: Path, changed: dict[str, Any]) -> None:
    for path in whole(tmp_path, Training("adam", 0)):
        rewrite(path, **changed)
        with pytest.raises(CorruptPart):
            part_file.read_header(LocalStorage(tmp_path), str(path.relative_to(tmp_path)))
    (found,) = catalogue.find(LocalStorage(tmp_path))
    assert not found.is_complete and found.reason


def test_what_is_whole_still_decodes(tmp_path: Path) -> None:
    header, _ = part_of(Training("adam", 0), RunState(3, PLACE.name), 1, 4)
    assert Header.decode(header.encode()[8:]) == header
