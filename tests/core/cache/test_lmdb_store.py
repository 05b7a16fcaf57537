"""The node's own store: frames come back, many processes share it, and no fault of it becomes one of the training."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from bagua_core.cache.errors import StoreFault
from bagua_core.cache.fault_notices import FaultNotices
from bagua_core.cache.frames import Unreadable, decode_many, encode
from bagua_core.cache.keys import digest_of
from bagua_core.cache.lmdb_store import LmdbStore
from bagua_core.cache.refusal_mark import RETRY_AFTER_REMOVAL_S, RETRY_AFTER_S
from bagua_core.cache.stores import Item
from tests.lab.wait import eventually

MIB = 1 << 20


def opened(path: Path, capacity_bytes: int = 8 * MIB, kept: int = 0) -> LmdbStore:
    return LmdbStore(path, capacity_bytes, FaultNotices(path, "cache"), kept)


def item(number: int, size: int = 100, replaces: bool = False) -> Item:
    key = digest_of(number)
    return Item(key, encode(torch.full((size,), float(number)), key), replaces)


def first_value(store: LmdbStore, number: int) -> float | None:
    key = digest_of(number)
    (frame,) = store.read([key])
    value = None if frame is None else float(decode_many([frame], [key])[0][0])
    store.end_read()
    return value


def test_frames_come_back_in_every_process_that_opens_it(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    written = one.write([item(i) for i in range(50)])
    assert (written.stored, written.refused, written.lost) == (50, 0, 0)
    assert [first_value(other, i) for i in range(51)] == [*map(float, range(50)), None]
    assert other.count() == 50
    assert one.write([item(3)]).stored == 0, "it is there"
    assert one.usage().used_bytes == other.usage().used_bytes > 50 * 400


def test_a_frame_is_replaced_if_that_is_asked(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write([item(1)])
    key = digest_of(1)
    store.write([Item(key, encode(torch.zeros(1), key), True)])
    assert first_value(store, 1) == 0 and store.count() == 1


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_a_frame_whose_replacement_is_refused_is_removed(tmp_path: Path, size: int) -> None:
    store = opened(tmp_path, 2 * MIB)
    count = 0
    while not store.write([item(count, size)]).refused:
        count += 1
    for number in (0, 1):  # the second one is not even tried
        key = digest_of(number)
        written = store.write([Item(key, encode(torch.zeros(MIB), key), True)])
        assert (written.stored, written.refused, written.lost) == (0, 1, 0)
        assert first_value(store, number) is None
    assert store.count() == count - 2 and first_value(store, 2) == 2


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_the_capacity_is_a_bound_and_what_is_in_stays(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    capacity = 2 * MIB
    store = opened(tmp_path, capacity)
    count = 3 * capacity // (4 * size)
    stored = refused = 0
    for begin in range(0, min(count, 20000), 20):
        written = store.write([item(i, size) for i in range(begin, begin + 20)])
        stored, refused = stored + written.stored, refused + written.refused
    held = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert held <= capacity + 16384 and refused > 0
    assert all(first_value(store, i) == i for i in range(0, stored, 7)), "what came first stays"
    assert store.count() == stored
    assert caplog.text.count("full: ") == 1, "said once"
    if size > 10:
        frame = len(item(0, size).frame)
        assert stored >= (capacity * 7 / 8 - frame) // (frame + 64), "and the capacity is used"
        assert store.write([item(1000, 10)]).stored == 1, "a smaller one still fits"


def test_a_full_file_system_is_no_error_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real one, of 4 MiB, that others fill."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mounted)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"mounting needs root, as the lab does: {done.stderr}"
    try:
        store = opened(mounted, 64 * MIB)
        assert store.write([item(i, 10_000) for i in range(20)]).stored == 20
        fill(mounted / "others")
        written = store.write([item(i, 10_000) for i in range(20, 40)])
        assert (written.stored, written.refused + written.lost) == (0, 20)
        assert [first_value(store, i) for i in (0, 19, 20)] == [0.0, 19.0, None]
        (mounted / "others").unlink()
        assert opened(mounted).write([item(100, 10_000)]).stored == 1, "with room again, it takes more"
        fill(mounted / "others")
        (mounted / "sub").mkdir()
        with pytest.raises(OSError, match="No space left"):
            opened(mounted / "sub")
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)
    assert caplog.text.count("full: ") + caplog.text.count("takes no more") == 1


def fill(path: Path) -> None:
    """Until there is no room."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="No space left"):
            while True:
                os.write(descriptor, bytes(4096))
    finally:
        os.close(descriptor)


def test_others_keep_their_room(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    store = opened(tmp_path, kept=system.f_bavail * system.f_frsize + (1 << 40))
    assert store.write([item(1)]).refused == 1


def test_a_write_that_the_system_cuts_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on file sizes makes a write short first, and then fail: nothing half-written is found."""
    store = opened(tmp_path)
    store.write([item(0, 1000)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.usage().used_bytes + 6000, limits[1]))
    try:
        written = store.write([item(i, 1000) for i in range(1, 4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (written.stored, written.lost) == (0, 3)
    assert [first_value(store, i) for i in range(4)] == [0.0, None, None, None]
    assert store.write([item(i, 1000) for i in range(1, 4)]).stored == 3
    assert [first_value(store, i) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert caplog.text.count("takes no more") == 1


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.mdb"
    store = opened(tmp_path)
    store.write([item(i, 1000) for i in range(30)])
    store.close()
    del store  # which keeps the file open in this process
    whole = data.read_bytes()
    data.write_bytes(b"something" * 1000 + whole[9000:])
    with pytest.raises(StoreFault, match="not an LMDB file"):
        opened(tmp_path)
    data.write_bytes(whole[:20480])
    with pytest.raises(StoreFault, match="shorter than"):
        opened(tmp_path)
    data.write_bytes(whole)
    assert first_value(opened(tmp_path), 29) == 29


def test_damaged_data_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write([item(i) for i in range(3)])
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    data[data.index(item(1).frame) + len(item(1).frame) - 10] ^= 0x55
    (tmp_path / "data.mdb").write_bytes(data)
    keys = [digest_of(i) for i in range(3)]
    frames = [frame for frame in store.read(keys) if frame is not None]
    values = decode_many(frames, keys)
    assert [isinstance(value, Unreadable) for value in values] == [False, True, False]


def test_a_damaged_table_is_a_fault_of_the_cache_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    store.write([item(i, 1000) for i in range(100)])
    with open(tmp_path / "data.mdb", "r+b") as data:
        data.seek(8192)  # behind the two pages that name the table's root
        data.write(b"\x55" * (store.usage().used_bytes - 8192))
    assert store.read([digest_of(1)]) == [None]
    assert store.write([item(200)]).lost == 1
    assert "cannot be read" in caplog.text and "takes no more" in caplog.text


def read_and_write(path: Path) -> None:
    store = opened(path)
    assert first_value(store, 1) == 1 and store.write([item(2)]).stored == 1


def test_a_forked_process_opens_it_anew(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write([item(1)])
    child = multiprocessing.get_context("fork").Process(target=read_and_write, args=(tmp_path,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert [first_value(store, i) for i in (1, 2)] == [1.0, 2.0]


def write_for_ever(path: Path, first: int) -> None:
    store = opened(path, 256 * MIB)
    number = first
    while True:
        store.write([item(i, 500) for i in range(number, number + 7)])
        number += 7


def test_writers_killed_at_any_moment_are_harmless(tmp_path: Path) -> None:
    """Four processes write the same and other keys; each is killed in the middle and another takes its place."""
    context = multiprocessing.get_context("fork")
    store = opened(tmp_path, 256 * MIB)
    writers = []
    for turn in range(12):
        writers.append(context.Process(target=write_for_ever, args=(tmp_path, turn % 3)))
        writers[-1].start()
        before = store.count()
        eventually(lambda before=before: store.count() > before + 20, 20, "writers write")  # type: ignore[misc]
        if len(writers) >= 4:
            victim = writers.pop(0)
            victim.kill()
            victim.join()
    for writer in writers:
        writer.kill()
        writer.join()
    assert store.write([item(10**9)]).stored == 1, "the lock is free"
    assert first_value(store, 10**9) == 10**9
    found = Counter(first_value(store, i) == i for i in range(3000) if first_value(store, i) is not None)
    assert found[False] == 0 and found[True] > 100


def read_while_written(path: Path, count: int) -> None:
    store = opened(path, 64 * MIB)
    keys = [digest_of(i) for i in range(count)]
    missing: list[bytes] = keys
    while missing:
        frames = store.read(missing)
        there = [(frame, key) for frame, key in zip(frames, missing, strict=True) if frame is not None]
        values = decode_many([frame for frame, _ in there], [key for _, key in there])
        assert not any(isinstance(value, Unreadable) for value in values)
        missing = [key for frame, key in zip(frames, missing, strict=True) if frame is None]


def test_readers_see_whole_frames_or_none(tmp_path: Path) -> None:
    count = 3000
    store = opened(tmp_path, 64 * MIB)
    readers = [
        multiprocessing.get_context("fork").Process(target=read_while_written, args=(tmp_path, count))
        for _ in (0, 1)
    ]
    for reader in readers:
        reader.start()
    for i in range(0, count, 5):
        store.write([item(j, 200) for j in range(i, i + 5)])
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 0


def test_clearing_forgets(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write([item(i) for i in range(10)])
    store.clear()
    assert store.count() == 0 and first_value(store, 3) is None
    assert store.write([item(3)]).stored == 1


def filled(store: LmdbStore, size: int, batch: int) -> int:
    """Values in `store`, which refuses further ones of this size."""
    for begin in range(0, 1 << 20, batch):
        if store.write([item(i, size) for i in range(begin, begin + batch)]).refused:
            return store.count()
    raise AssertionError("never full")


@pytest.mark.parametrize(("capacity", "size"), [(MIB, 30_000), (2 * MIB, 1000), (40 * MIB, 1000)])
def test_a_full_cache_that_is_cleared_takes_as_much_again(
    tmp_path: Path, capacity: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = opened(tmp_path, capacity), opened(tmp_path, capacity)
    held = filled(store, size, 20 if capacity < 4 * MIB else 500)
    assert first_value(store, 0) == 0.0, "it reads when it is cleared"
    assert other.write([item(-1, size)]).refused == 1
    assert first_value(other, 0) == 0.0, "and so does another process"
    store.clear()
    assert store.count() == 0
    assert sum(store.write([item(i, size)]).stored for i in range(5)) == 5
    assert other.write([item(5, size)]).stored == 1, "so does a process that did not clear it"
    again = sum(store.write([item(i, size)]).stored for i in range(6, min(held, 100)))
    assert again >= min(held, 100) - 6 - 2
    assert caplog.text.count("takes values again") == 1


def test_a_read_under_way_holds_back_room_that_a_clear_frees_until_it_ends(tmp_path: Path) -> None:
    now_s = 0.0
    store, other = (
        LmdbStore(tmp_path, 2 * MIB, FaultNotices(tmp_path, "cache"), 0, clock=lambda: now_s) for _ in "ab"
    )
    filled(store, 1000, 20)
    other.read([digest_of(0)])
    store.clear()
    assert store.write([item(0, 1000)]).refused == other.write([item(1, 1000)]).refused == 1
    other.end_read()
    now_s = RETRY_AFTER_REMOVAL_S
    assert store.write([item(0, 1000)]).stored == other.write([item(1, 1000)]).stored == 1


def test_clearing_a_large_full_cache_waits_for_the_reads_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(tmp_path, 40 * MIB), opened(tmp_path, 40 * MIB)
    filled(store, 1000, 500)
    other.read([digest_of(0)])
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        other.end_read()

    monkeypatch.setattr(time, "sleep", wait)
    store.clear()
    assert len(waits) == 1 and store.count() == 0
    assert store.write([item(0, 1000)]).stored == 1


def test_room_that_comes_back_by_itself_is_used_after_a_while(tmp_path: Path) -> None:
    now_s = 0.0
    store = LmdbStore(tmp_path, MIB, FaultNotices(tmp_path, "cache"), 0, clock=lambda: now_s)
    held = filled(store, 30_000, 2)
    for names in ((b"a", b"b", b"c", b"d"), (b"e",), (b"f",)):
        with store._environment.begin(write=True) as transaction:
            for number, name in enumerate(names):
                transaction.put(name, b"")
                if len(names) > 1:
                    transaction.delete(digest_of(number))
    assert store.count() > held
    assert store.write([item(500, 30_000)]).refused == 1, "it has as many entries as before"
    now_s = RETRY_AFTER_S
    assert store.write([item(501, 30_000)]).stored == 1


def test_a_passing_shortage_of_the_file_system_refuses_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(store, "_free_bytes", lambda: 0)
        assert store.write([item(1)]).refused == 1
    assert store.write([item(2, 10)]).stored == 1
    assert "takes values again" not in caplog.text, "a smaller one"
    assert store.write([item(3)]).stored == 1
    assert caplog.text.count("full: ") == caplog.text.count("takes values again") == 1


def test_frames_outlive_the_close_and_a_directory_made_anew_is_another(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    store, key = opened(path), digest_of(1)
    store.write([item(1, 50_000)])
    (frame,) = store.read([key])
    assert frame is not None
    store.close()
    shutil.rmtree(path)
    path.mkdir()
    anew = opened(path)
    assert anew.read([key]) == [None], "not the file that was removed"
    assert float(decode_many([frame], [key])[0][0]) == 1.0
    del frame
