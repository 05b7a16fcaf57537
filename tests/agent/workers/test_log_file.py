"""Logs of bounded size: what is kept, where its parts lie, and that a reader loses nothing across a rotation."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from bagua_agent.workers.output.log_file import LogFile
from bagua_agent.workers.output.log_parts import extent, part_ends, part_path, read_piece

DEADLINE_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


def on_disk(path: Path) -> int:
    return sum(p.stat().st_size for p in path.parent.iterdir())


def all_kept(path: Path) -> bytes:
    position, _ = extent(path)
    found = b""
    while data := read_piece(path, position, 100).data:
        found += data
        position += len(data)
    return found


def test_the_newest_lines_are_kept_in_two_parts(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LogFile(path, most_bytes=1000)
    written = b""
    for number in range(1000):
        line = f"line {number}\n".encode()
        written += line
        file.write(line)
        assert on_disk(path) <= 1000
    file.close()
    kept = all_kept(path)
    assert written.endswith(kept) and kept.startswith(b"line ") and len(kept) >= 480
    assert extent(path) == (len(written) - len(kept), len(written))
    assert sorted(p.name for p in path.parent.iterdir()) == ["stdout.log", f"stdout.log.{part_ends(path)[0]}"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "stdout.log has reached its bound" in said and "--max-log-mib" in said


def test_a_line_longer_than_a_part_is_cut_and_not_lost(path: Path) -> None:
    file = LogFile(path, most_bytes=1000)
    file.write(b"x" * 700 + b"\n")
    file.close()
    assert all_kept(path) == b"x" * 700 + b"\n"


def test_without_a_bound_all_is_kept(path: Path) -> None:
    file = LogFile(path)
    file.write(b"line\n" * 10_000)
    file.close()
    assert path.stat().st_size == 50_000 and part_ends(path) == []


def test_a_file_that_is_there_already_goes_on(path: Path) -> None:
    for _ in range(3):  # filtered lines are appended by each agent of the job
        file = LogFile(path, most_bytes=100)
        file.write(b"0123456\n" * 10)
        file.close()
    assert extent(path)[1] == 240 and on_disk(path) <= 100


def test_what_the_accounts_own_processes_do_to_the_file_confuses_no_position(path: Path) -> None:
    file = LogFile(path, most_bytes=1000)
    file.write(b"one\n" * 100)
    os.truncate(path, 1 << 40)  # the account owns it
    file.write(b"two\n")  # in another part
    assert extent(path) == (0, 404) and read_piece(path, 400, 100).data == b"two\n"
    os.truncate(path, 0)
    file.write(b"x" * 498)
    file.write(b"three\n")
    assert extent(path)[1] == 404 + 498 + 6 and on_disk(path) <= 1000
    assert read_piece(path, 404 + 498, 100).data == b"three\n"
    for end in part_ends(path):
        os.truncate(part_path(path, end), 0)
    position, end = extent(path)
    assert read_piece(path, 0, 100).position == position and end == 908
    for number in range(100):  # and each part that it makes large is removed all the same
        os.truncate(path, 1 << 40)
        file.write(b"%d\n" % number)
    assert len(list(path.parent.iterdir())) == 2
    file.close()


def test_a_rotation_that_the_disk_refuses_ends_the_log_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LogFile(path, most_bytes=100)
    file.write(b"0123456\n" * 6)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))  # no directory can be listed
    try:
        file.write(b"0123456\n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    file.write(b"more\n")
    file.close()
    assert path.read_bytes() == b"0123456\n" * 6
    assert [r for r in caplog.records if "stdout.log is not written any further" in r.getMessage()]


def test_a_reader_beside_a_writer_that_rotates_sees_each_byte_in_its_place(path: Path) -> None:
    """Lines of ten bytes; each line holds its own position."""
    file = LogFile(path, most_bytes=2000)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            file.write(b"".join(b"%09d\n" % n for n in range(number, number + 7)))
            number += 7

    thread = threading.Thread(target=write)
    thread.start()
    try:
        position, gaps = 0, 0
        while position < 2_000_000:
            piece = read_piece(path, position, 150)
            assert piece.position >= position
            gaps += piece.position > position
            position = piece.position
            lines = [int(piece.data[at : at + 10]) for at in range(0, len(piece.data) - 9, 10)]
            assert position % 10 == 0 and lines == list(range(position // 10, position // 10 + len(lines)))
            position += 10 * len(lines)
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        file.close()
    assert on_disk(path) <= 2000
