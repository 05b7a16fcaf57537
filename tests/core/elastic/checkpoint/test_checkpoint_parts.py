"""A part's file is whole or does not count, wherever its writer died and whatever became of its bytes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bagua_contract.checkpoint_every import CheckpointEvery
from bagua_contract.records import StateName
from bagua_core.checkpoint import main
from bagua_core.communication import traffic
from bagua_core.elastic.checkpoint import catalogue, layout, part_file, restore
from bagua_core.elastic.checkpoint.catalogue import RunState
from bagua_core.elastic.checkpoint.checkpointer import Checkpointer, Settings
from bagua_core.elastic.checkpoint.local_storage import EDGES, LocalStorage
from bagua_core.elastic.checkpoint.part_file import CorruptPart, Header
from bagua_core.elastic.checkpoint.reading import READERS, read_each
from tests.core.elastic.state.trainings import Training, wire_form

PLACE = RunState(1, StateName(1, 4, 0))
Part = tuple[Header, torch.Tensor]


def part_of(training: Training, place: RunState, part: int, parts: int) -> Part:
    stripe = layout.stripe(training.registry.capture(), part, parts)
    data = torch.empty(stripe.size_bytes, dtype=torch.uint8)
    stripe.read_into(data)
    header = Header(
        run=place.run,
        job="job",
        name=place.name,
        part=part,
        parts=parts,
        layout_digest=stripe.layout_digest,
        manifest_crc=stripe.manifest_crc,
        digest=part_file.digest(data),
        entries=stripe.entries,
        position={"epoch": 0, "batch": place.name.step},
        fingerprint=training.registry.fingerprint(),
    )
    return header, data


def write(root: Path, place: RunState, part: Part) -> None:
    part_file.write(LocalStorage(root), place.directory_name, *part, lambda edge: None)


def whole(root: Path, training: Training, place: RunState = PLACE, parts: int = 3) -> list[Path]:
    for part in range(parts):
        write(root, place, part_of(training, place, part, parts))
    return sorted((root / place.directory_name).iterdir())


def read(root: Path, training: Training, place: RunState = PLACE) -> restore.Restored:
    return restore.read(LocalStorage(root), place, training.registry.fingerprint())


@pytest.mark.parametrize("parts", [1, 2, 7, 40])
def test_what_was_written_is_read_bit_for_bit(tmp_path: Path, parts: int) -> None:
    holder, other = Training("adam", 1), Training("adam", 2)
    holder.train(3, seed=5)
    whole(tmp_path, holder, parts=parts)
    restored = read(tmp_path, other)
    other.registry.restore(restored.state)
    assert wire_form(other.registry.capture()) == wire_form(holder.registry.capture())
    assert (restored.step, restored.position) == (4, {"epoch": 0, "batch": 4})


def test_what_arrives_of_a_checkpoint_is_counted(tmp_path: Path) -> None:
    training = Training("adam", 1)
    whole(tmp_path, training)
    before = traffic.state_arrived.total_bytes
    read(tmp_path, training)
    read_bytes = sum(part.numel() * part.element_size() for part in training.model.parameters())
    assert traffic.state_arrived.total_bytes - before > read_bytes


def test_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    training = Training("sgd", 1)
    training.train(2, seed=5)
    paths = whole(tmp_path, training, parts=2)
    good = read(tmp_path, training)
    for path in paths:
        content = path.read_bytes()
        places = {*range(64), 200, len(content) - 1}
        for place in sorted(places | set(range(0, len(content), 97))):
            path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
            with pytest.raises(CorruptPart):
                read(tmp_path, training)
        for length in (0, 3, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            assert not catalogue.find(LocalStorage(tmp_path))[0].is_complete
        path.write_bytes(content + b"x")
        assert not catalogue.find(LocalStorage(tmp_path))[0].is_complete
        path.write_bytes(content)
    assert read(tmp_path, training).position == good.position


def test_a_missing_part_and_one_of_another_checkpoint(tmp_path: Path) -> None:
    training = Training("sgd", 1)
    paths = whole(tmp_path, training)
    content = paths[1].read_bytes()
    paths[1].unlink()
    assert catalogue.find(LocalStorage(tmp_path))[0].reason == "part 1 of 3 is missing"
    paths[1].write_bytes(paths[2].read_bytes())
    assert "another checkpoint" in catalogue.find(LocalStorage(tmp_path))[0].reason
    header, data = part_of(training, PLACE, 1, 3)
    for strange in (
        replace(header, job="another"),
        replace(header, name=StateName(2, 4, 0)),
        replace(header, run=2),
        replace(header, layout_digest="f"),
    ):
        paths[1].unlink()
        write(tmp_path, PLACE, (strange, data))
        assert "another checkpoint" in catalogue.find(LocalStorage(tmp_path))[0].reason
    paths[1].write_bytes(content)
    assert catalogue.find(LocalStorage(tmp_path))[0].is_complete


@pytest.mark.parametrize("edge", EDGES)
def test_a_writer_killed_at_any_edge_leaves_no_wrong_checkpoint(tmp_path: Path, edge: str) -> None:
    training = Training("sgd", 1)
    training.train(1, seed=5)
    older = RunState(1, StateName(1, 2, 0))
    whole(tmp_path, training, older)
    training.train(1, seed=6)
    for part in (0, 2):
        write(tmp_path, PLACE, part_of(training, PLACE, part, 3))
    prepared = part_of(training, PLACE, 1, 3)

    def die(reached: str) -> None:
        if reached == edge:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            part_file.write(LocalStorage(tmp_path), PLACE.directory_name, *prepared, die)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer never came to {edge!r}"

    newest = next(f.place for f in catalogue.find(LocalStorage(tmp_path)) if f.is_complete)
    assert newest == (PLACE if edge in ("renamed", "directory synced") else older)
    read(tmp_path, training, newest)
    write(tmp_path, PLACE, prepared)  # its remains do not interfere
    other = Training("sgd", 2)
    other.registry.restore(read(tmp_path, training).state)
    assert wire_form(other.registry.capture()) == wire_form(training.registry.capture())


def spoil_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 9)


def spoil_data(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def write_twice(root: Path, replicas: tuple[str, str]) -> tuple[list[Training], Path]:
    """Returns two states of one name, written in one part and in two, and the part of the first."""
    states = [Training("adam", seed) for seed in (1, 1 if len(set(replicas)) == 1 else 2)]
    for training, replica, parts in zip(states, replicas, (1, 2), strict=True):
        for part in range(parts):
            header, data = part_of(training, PLACE, part, parts)
            write(root, PLACE, (replace(header, replica=replica), data))
    return states, root / PLACE.directory_name / part_file.file_name(0, 1, replicas[0])


@pytest.mark.parametrize("replicas", [("", ""), ("a", "b")])
@pytest.mark.parametrize("spoil", [spoil_header, spoil_data])
def test_a_bad_part_spoils_its_own_set_alone(
    tmp_path: Path, replicas: tuple[str, str], spoil: Callable[[Path], None]
) -> None:
    states, bad = write_twice(tmp_path, replicas)
    spoil(bad)
    said: list[str] = []
    script = states[0].registry.fingerprint()
    checkpointer = Checkpointer(
        Settings(LocalStorage(tmp_path), CheckpointEvery.decode("1")), said.append, lambda: script
    )
    restored = None
    while restored is None:
        choice = checkpointer.choose(None, "job", lambda pending: None)
        assert choice.place == PLACE
        restored = checkpointer.read(choice)
        if restored is None:
            checkpointer.could_not_read(choice)
    checkpointer.close(10.0)
    other = Training("adam", 3)
    other.registry.restore(restored.state)
    assert wire_form(other.registry.capture()) == wire_form(states[1].registry.capture())


def test_an_export_reads_the_set_that_is_whole(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    _, bad = write_twice(tmp_path / "saved", ("a", "b"))
    spoil_data(bad)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out.pt")]) == 0
    spoil_data(bad.with_name(part_file.file_name(1, 2, "b")))
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out.pt")]) == 1


@pytest.mark.parametrize(
    ("written", "own", "fits"),
    [
        ("none", "bagua.sampler", True),  # of a version without it
        ("schedule, bagua.stream", "schedule", True),
        ("bagua.stream", "bagua.stream, schedule", False),
        ("schedule", "none", False),
    ],
)
def test_what_bagua_registers_itself_makes_no_other_script(
    tmp_path: Path, written: str, own: str, fits: bool
) -> None:
    training = Training("adam", 1)
    header, data = part_of(training, PLACE, 0, 1)
    script = header.fingerprint
    write(tmp_path, PLACE, (replace(header, fingerprint={**script, "registered": written}), data))
    expected = nullcontext() if fits else pytest.raises(restore.CheckpointMismatch, match="registered: ")
    with expected:
        restore.read(LocalStorage(tmp_path), PLACE, {**script, "registered": own})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("12 parameters, shapes b", "an earlier version of bagua wrote it"),
        ("13 parameters, shapes b", "is of another script"),
    ],
)
def test_a_model_of_as_many_parameters_may_be_the_same_one(tmp_path: Path, own: str, message: str) -> None:
    """An earlier version may have laid out the tensors of its algorithm in another way."""
    header, data = part_of(Training("adam", 1), PLACE, 0, 1)
    script = {**header.fingerprint, "model": "12 parameters, shapes a"}
    write(tmp_path, PLACE, (replace(header, fingerprint=script), data))
    with pytest.raises(restore.CheckpointMismatch, match=message) as raised:
        restore.read(LocalStorage(tmp_path), PLACE, {**script, "model": own})
    assert "shapes a" in str(raised.value) and "another --checkpoint-dir" in str(raised.value)


def test_which_may_go(tmp_path: Path) -> None:
    training = Training("sgd", 1)

    def place(run: int, step: int) -> RunState:
        return RunState(run, StateName(1, step, 0))

    for step in (2, 4, 6):
        whole(tmp_path, training, place(1, step), parts=1)
    write(tmp_path, place(1, 7), part_of(training, place(1, 7), 0, 2))
    # 7 may still be under way
    assert catalogue.removable(catalogue.find(LocalStorage(tmp_path))) == [place(1, 2)]
    whole(tmp_path, training, place(2, 8), parts=1)
    doomed = catalogue.removable(catalogue.find(LocalStorage(tmp_path)))
    assert doomed == [place(1, 7), place(1, 4), place(1, 2)]
    for one in doomed:
        catalogue.remove(LocalStorage(tmp_path), one)
    assert [f.place for f in catalogue.find(LocalStorage(tmp_path))] == [place(2, 8), place(1, 6)]


def test_a_later_run_undoes_what_came_after_its_start(tmp_path: Path) -> None:
    training = Training("sgd", 1)
    for step in (2, 4, 6):
        whole(tmp_path, training, RunState(1, StateName(1, step, 0)), parts=1)
    catalogue.write_run(LocalStorage(tmp_path), catalogue.Run(2, 4), "another")
    found = catalogue.find(LocalStorage(tmp_path))
    assert [f.place.name.step for f in found if f.is_complete] == [4, 2]
    assert "later run" in found[0].reason
    assert catalogue.next_run(LocalStorage(tmp_path)) == 3


def test_names_of_directories() -> None:
    place = RunState(12, StateName(3, 1_234_567_890, 2))
    assert RunState.of(place.directory_name) == place
    for name in ("", "run-0001.json", "step", place.directory_name + "x", "." + place.directory_name):
        assert RunState.of(name) is None


def test_parts_are_read_at_the_same_time_and_the_first_error_is_raised() -> None:
    together = threading.Barrier(READERS)  # passes only where READERS read at once

    def read(name: str) -> str:
        together.wait(10)
        return name.upper()

    names = [f"part-{number}" for number in range(2 * READERS)]
    assert read_each(read, names) == [name.upper() for name in names]

    def fail(name: str) -> str:
        raise CorruptPart(name)

    with pytest.raises(CorruptPart, match="part-"):
        read_each(fail, names)
    assert read_each(fail, []) == []
