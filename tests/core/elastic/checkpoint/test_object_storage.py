"""Checkpoints in an object store are whole or not used: a server of S3's protocol, and fsspec's own file systems."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem

from bagua_contract import checkpoint_dir
from bagua_contract.records import StateName
from bagua_core import checkpoint
from bagua_core.elastic.checkpoint import catalogue, object_storage, part_file, restore
from bagua_core.elastic.checkpoint.catalogue import RunState
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.object_storage import ObjectStorage
from bagua_core.elastic.checkpoint.restore import CheckpointsUnreadable
from bagua_core.elastic.checkpoint.storage import CheckpointDirError, Storage, storage_of
from tests.core.elastic.checkpoint.checkpoint_worlds import together, world
from tests.core.elastic.checkpoint.test_checkpoint_parts import PLACE, Part, part_of
from tests.core.elastic.state.trainings import Training, wire_form
from tests.lab.object_store import BUCKET, ObjectStore, variables
from tests.lab.wait import HANG_S

ROOT = Path(__file__).resolve().parents[4]
OLDER = RunState(1, StateName(1, 2, 0))


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    made = ObjectStore()
    yield made
    made.end()


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server, as the environment names it."""
    for name, value in variables(server.gate.port).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def url(store: ObjectStore, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}".replace("[", "-").replace("]", "")


@pytest.fixture(params=["local", "fsspec memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path)
    if request.param == "fsspec memory":
        files = AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=False)
        return ObjectStorage(files, str(tmp_path), "memory")
    return storage_of(request.getfixturevalue("url"))


def write(storage: Storage, part: Part, place: RunState = PLACE) -> None:
    part_file.write(storage, place.directory_name, *part, lambda edge: None)


def whole(storage: Storage, training: Training, place: RunState = PLACE) -> None:
    for part in range(2):
        write(storage, part_of(training, place, part, 2), place)


def steps(storage: Storage) -> list[int]:
    return [f.place.name.step for f in catalogue.find(storage) if f.is_complete]


# -- every storage alike


def test_what_a_storage_holds(storage: Storage) -> None:
    storage.prepare()
    assert storage.entries() == []
    storage.write("directory/b", (b"first ", memoryview(b"second")))
    storage.write("directory/a", (b"other",))
    storage.write("file", (b"",))
    storage.write("file", (b"replaced",))
    assert sorted(storage.entries()) == ["directory", "file"]
    assert sorted(storage.entries("directory")) == ["a", "b"]
    with storage.open("directory/b") as file:
        assert (file.read(3), file.tell(), file.read()) == (b"fir", 3, b"st second")
        assert file.seek(0, 2) == 12 and file.read(1) == b""
    with storage.open("file") as file:
        assert file.read() == b"replaced"
    with pytest.raises(OSError, match="nothing"):
        storage.open("directory/nothing")
    storage.remove_directory("directory")
    assert storage.entries() == ["file"]


def test_any_world_goes_on_from_any_other(storage: Storage) -> None:
    first = world(storage, 3)
    together(first, 6, begin=True)
    assert steps(storage)[:2] == [6, 4]
    second = world(storage, 2, seed=7)
    together(second, begin=True)
    forms = {wire_form(rank.training.registry.capture()) for rank in (first[0], *second)}
    assert len(forms) == 1 and {rank.name.step for rank in second} == {6}
    assert {rank.checkpointer.run for rank in second} == {2}
    together(second, 4)
    together(second, 2)  # rank 0 has looked once more: the parts of others may come later than its own
    assert steps(storage)[:2] == [12, 10] and len(steps(storage)) <= 3


def test_a_removal_that_was_interrupted_leaves_nothing_that_counts(storage: Storage) -> None:
    training = Training("sgd", 1)
    for step in (2, 4, 6):
        whole(storage, training, RunState(1, StateName(1, step, 0)))
    (doomed,) = catalogue.removable(catalogue.find(storage))
    first = min(storage.entries(doomed.directory_name))
    assert first.startswith("part-00000-")
    storage.write(f"{doomed.directory_name}/{first}", (b"",))  # as good as gone
    assert steps(storage) == [6, 4]
    assert catalogue.removable(catalogue.find(storage)) == [doomed]
    catalogue.remove(storage, doomed)
    assert [f.place.name.step for f in catalogue.find(storage)] == [6, 4]


# -- writers that die or come late

UPLOAD = """
import sys
from bagua_core.elastic.checkpoint.storage import storage_of
url, name, content = sys.argv[1:]
with open(content, "rb") as file:
    storage_of(url).write(name, (file.read(),))
"""


@pytest.mark.parametrize("is_large", [False, True], ids=["at-once", "in-pieces"])
def test_a_writer_killed_in_the_middle_of_an_upload_leaves_no_checkpoint(
    store: ObjectStore, url: str, tmp_path: Path, is_large: bool
) -> None:
    training, storage = Training("sgd", 1), storage_of(url)
    whole(storage, training, OLDER)
    training.train(1, seed=5)
    prepared = part_of(training, PLACE, 0, 2)
    write(storage, prepared)
    header, data = part_of(training, PLACE, 1, 2)
    content = tmp_path / "part"
    # The large one is of the size at which s3fs divides an upload. What is in it does not matter here.
    content.write_bytes(bytes(100 << 20) if is_large else header.encode() + data.numpy().tobytes())
    name = f"{PLACE.directory_name}/{part_file.file_name(1, 2)}"

    store.gate.hold(part_file.file_name(1, 2))
    writer = subprocess.Popen([sys.executable, "-c", UPLOAD, url, name, str(content)], cwd=ROOT)
    try:
        held = store.gate.await_held()
        assert 0 < held.sent_bytes < held.of_bytes and writer.poll() is None
        begun = [key for key in store.unfinished_uploads() if key.endswith(name)]
        assert len(begun) == int(is_large)
    finally:
        writer.kill()
    assert writer.wait(10) == -signal.SIGKILL
    store.gate.drop()

    (newest, older) = catalogue.find(storage)
    assert not newest.is_complete and newest.reason == "part 1 of 2 is missing"
    assert older.place == OLDER and older.is_complete
    write(storage, (header, data))  # what is left of the upload does not interfere
    other = Training("sgd", 2)
    other.registry.restore(restore.read(storage, PLACE, training.registry.fingerprint()).state)
    assert wire_form(other.registry.capture()) == wire_form(training.registry.capture())


def test_a_part_that_arrives_after_the_next_run_began_is_void(store: ObjectStore, url: str) -> None:
    (late,) = world(storage_of(url), 1)
    late.begin()
    for _ in range(3):
        late.step()
    store.gate.hold("step-000000004")
    late.step(settle=False)
    store.gate.await_held()
    (next_one,) = world(storage_of(url), 1, seed=3)
    next_one.begin()
    assert next_one.name.step == 2 and next_one.checkpointer.run == 2
    store.gate.release()
    assert late.checkpointer.writer.wait(20) and not late.checkpointer.writer.problem
    newest = catalogue.find(storage_of(url))[0]
    assert newest.place.name.step == 4 and newest.reason == "a later run went on from before it"
    (third,) = world(storage_of(url), 1, seed=4)
    third.begin()
    assert third.name.step == 2


def test_a_shorter_object_and_one_of_other_bytes_do_not_count(store: ObjectStore, url: str) -> None:
    training, storage = Training("sgd", 1), storage_of(url)
    whole(storage, training)
    name = f"{PLACE.directory_name}/{part_file.file_name(1, 2)}"
    with storage.open(name) as file:
        content = file.read()
    storage.write(name, (content[:-1],))
    assert f"{len(content) - 1} bytes instead of {len(content)}" in catalogue.find(storage)[0].reason
    storage.write(name, (content[:-1], bytes([content[-1] ^ 1])))
    assert catalogue.find(storage)[0].is_complete  # headers say nothing of it
    with pytest.raises(part_file.CorruptPart, match="another digest"):
        restore.read(storage, PLACE, training.registry.fingerprint())


# -- a store that is away


def test_a_store_that_does_not_answer_undoes_nothing(
    store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = world(storage_of(url), 1)
    rank.begin()
    for _ in range(4):
        rank.step()
    (again,) = world(storage_of(url), 1, seed=3)
    choice = again.checkpointer.choose(None, "job", lambda pending: pending.wait())
    assert choice.step == 4
    with store.gate.silent(), monkeypatch.context() as shorter:
        shorter.setattr(object_storage, "CALL_S", 0.5)
        began_s = time.monotonic()
        with pytest.raises(CheckpointsUnreadable, match="did not answer"):
            again.begin()
        assert again.checkpointer.read(choice) is None
        with pytest.raises(CheckpointsUnreadable, match="no member could read"):
            again.checkpointer.could_not_read(choice)
        rank.step()
        rank.step()  # training goes on
        assert "could not be written" in rank.said[-1] and len(rank.said) == 1
        assert time.monotonic() - began_s < 20
    store.gate.drop()  # of connections that were given up
    rank.step()
    rank.step()
    assert "written again" in rank.said[-1]
    written = rank.checkpointer.writer.written
    assert written is not None and written.place.name.step == 8


def test_a_bucket_that_is_not_there_and_missing_credentials_are_one_error_each(
    store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointsUnreadable, match="bucket nowhere is not there") as absent:
        together(world(storage_of("s3://nowhere/demo"), 1), begin=True)
    assert "\n" not in str(absent.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(CheckpointsUnreadable, match="credentials") as unknown:
        together(world(storage_of(url), 1), begin=True)
    assert url in str(unknown.value)
    assert checkpoint.main(["list", url]) == 1
    assert "credentials" in capsys.readouterr().err


def test_a_bucket_that_vanishes_is_said_once_and_tried_again(store: ObjectStore) -> None:
    store.client.create_bucket(Bucket="passing")
    (rank,) = world(storage_of("s3://passing"), 1, every="1")
    rank.begin()
    rank.step()
    for key in store.client.list_objects_v2(Bucket="passing")["Contents"]:
        store.client.delete_object(Bucket="passing", Key=key["Key"])
    store.client.delete_bucket(Bucket="passing")
    rank.step()
    rank.step()
    assert len(rank.said) == 1 and "step 2 could not be written" in rank.said[0]
    store.client.create_bucket(Bucket="passing")
    rank.step()
    assert steps(storage_of("s3://passing")) == [4] and "written again" in rank.said[1]


# -- URLs


def test_the_command_lists_and_exports_from_a_url(
    store: ObjectStore, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole(storage_of(url), Training("sgd", 1))
    assert checkpoint.main(["list", url]) == 0
    assert "in 2 parts" in capsys.readouterr().out
    assert checkpoint.main(["export", url, str(tmp_path / "out.pt")]) == 0
    assert (tmp_path / "out.pt").stat().st_size > 0


@pytest.mark.parametrize(
    "text", ["sftp://host/x", "S3://bucket/x", "s3://", "s3:///x", "s3://a/b?c", "file://x"]
)
def test_other_urls_are_refused(text: str) -> None:
    with pytest.raises(CheckpointDirError, match="known are s3"):
        storage_of(text)


def test_directories_and_urls_as_workers_get_them() -> None:
    assert checkpoint_dir.complete("saved") == str(Path.cwd() / "saved")
    assert checkpoint_dir.complete("file:///a/b") == "/a/b"
    assert checkpoint_dir.complete("s3://bucket/a/") == "s3://bucket/a"
    assert str(storage_of("/a/b")) == "/a/b"


MISSING = """
import sys
from bagua_core.elastic.checkpoint.storage import CheckpointDirError, storage_of

storage_of("/a")
assert "fsspec" not in sys.modules
for package in ("s3fs", "gcsfs", "fsspec"):
    sys.modules[package] = None
    try:
        storage_of("gs://bucket/demo" if package == "gcsfs" else "s3://bucket/demo")
    except CheckpointDirError as error:
        print(error)
"""


def test_a_missing_package_is_named_and_none_is_imported_for_a_directory() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MISSING], cwd=ROOT, check=True, timeout=HANG_S, capture_output=True, text=True
    )
    s3, gs, neither = ended.stdout.splitlines()
    assert "s3fs, which is not installed" in s3 and 'pip install "bagua-elastic[object-storage]"' in s3
    assert 'pip install "gcsfs"' in gs
    assert 'pip install "bagua-elastic[object-storage]"' in neither
